"""Accuracy of private runs on tables with nothing declared: what the defaults were chosen by, and how they do.

`python -m experiments recipes/tables --data DIR` compares four models and optimizers on four tables. `--judge` runs the
defaults on three other tables, beside a private logistic regression, and `--diffprivlib` that of diffprivlib. Each
writes a table beside this file, after each row. Every tenth row is held out; figures on it are exact,
because the tables are public.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import optimize, special

from clipwise.recipes.kind import Settings
from clipwise.recipes.tables import defaults
from experiments.harness.command import parser_of
from experiments.recipes import tables_diffprivlib
from experiments.recipes.table_runs import CHOSEN_ON, DELTA, JUDGED_ON, Prepared, accuracies, folder_of, prepared

HERE = Path(__file__).parent
EPSILONS = (1.0, 3.0)
CANDIDATES = (("linear", "sgd", 0.2), ("linear", "adam", 0.03), ("mlp", "sgd", 0.3), ("mlp", "adam", 0.03))
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    """Run one of the comparisons and write its results."""
    options = parser_of("python -m experiments recipes/tables", __doc__)
    options.add_argument("--data", default=None, help="the folder of the data sets")
    options.add_argument("--judge", action="store_true", help="run the defaults on other tables")
    options.add_argument("--diffprivlib", action="store_true", help="run diffprivlib on these other tables")
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--out", type=Path, default=HERE / "results")
    given = options.parse_args(arguments)
    torch.set_num_threads(given.threads)
    folder, name, others = folder_of(given.data), "tables_judged" if given.judge else "tables_chosen", {}
    rows, delta = (judged if given.judge else chosen)(folder, given.seeds), DELTA
    if given.diffprivlib:
        name, others = "tables_diffprivlib", tables_diffprivlib.versions()
        rows, delta = tables_diffprivlib.judged(folder, EPSILONS, given.seeds), 0.0
    given.out.mkdir(parents=True, exist_ok=True)
    about = {
        "seeds": given.seeds,
        "delta": delta,
        "counts_share": defaults.COUNTS_SHARE,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **others},
        "hardware": f"{platform.machine()}, {given.threads} thread",
    }
    found: list[Row] = []
    for row in rows:
        found.append(row)
        (given.out / f"{name}.json").write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")
        (given.out / f"{name}.md").write_text(written(found, given.seeds, delta))
    print(written(found, given.seeds, delta))


def chosen(folder: Path, seeds: int) -> Iterator[Row]:
    """All candidates on the tables that defaults are chosen on."""
    for name in CHOSEN_ON:
        for epsilon in EPSILONS:
            for model, optimizer, rate in CANDIDATES:

                def settings(data: Prepared, chosen: tuple[str, str, float] = (model, optimizer, rate)) -> Settings:
                    batch = round(len(data.train) * defaults.SAMPLE_RATE)
                    return Settings(chosen[0], batch, 20, chosen[2], optimizer=chosen[1], ema=defaults.EMA)

                runs = repeated(folder, name, epsilon, seeds, settings)
                yield {"table": name, "epsilon": epsilon, "run": f"{model}, {optimizer} {rate:g}", "accuracies": runs}


def judged(folder: Path, seeds: int) -> Iterator[Row]:
    """The defaults on the tables that they are judged on, and the baseline."""
    for name in JUDGED_ON:
        for epsilon in EPSILONS:

            def settings(data: Prepared, epsilon: float = epsilon) -> Settings:
                return defaults.settings(len(data.train), epsilon, "fast")

            label = prepared(folder, name, epsilon, defaults.COUNTS_SHARE, 0)
            model = settings(label).model
            runs = repeated(folder, name, epsilon, seeds, settings)
            yield {"table": name, "epsilon": epsilon, "run": f"clipwise, {model}", "accuracies": runs}
            baseline = [linear_baseline(folder, name, epsilon, seed) for seed in range(seeds)]
            run = "logistic regression by objective perturbation"
            yield {"table": name, "epsilon": epsilon, "run": run, "accuracies": baseline}
            yield {
                "table": name,
                "epsilon": epsilon,
                "run": "most frequent label",
                "accuracies": [most_frequent(label)],
            }


def repeated(
    folder: Path, name: str, epsilon: float, seeds: int, settings: Callable[[Prepared], Settings]
) -> list[float]:
    """The accuracy of the averaged weights, for each seed."""
    found = []
    for seed in range(seeds):
        data = prepared(folder, name, epsilon, defaults.COUNTS_SHARE, seed)
        found.append(round(accuracies(data, settings(data), epsilon, seed)["ema"], 4))
    return found


def linear_baseline(folder: Path, name: str, epsilon: float, seed: int) -> float:
    """Logistic regression by objective perturbation with the whole epsilon (delta = 0), on the same inputs.

    The inputs are a head start: their noised counts cost the baseline nothing. And of several regularizations the best
    on the held-out rows is reported. The norm of a row is at most the square root of the number of columns and a
    constant, because each column has inputs of norm at most 1 (these tables have no dates).
    """
    data = prepared(folder, name, epsilon, defaults.COUNTS_SHARE, seed)
    bound = math.sqrt(len(data.encoder.schema.columns) + 1)
    train, held_out = (with_constant(x) / bound for x in (data.train.tensors[0], data.x))
    y = data.train.tensors[1].numpy()
    sign = np.where(y == 1, 1.0, -1.0) * (y >= 0)
    random = np.random.default_rng(seed)
    found = []
    for strength in (1 / len(y), 1e-3, 1e-2, 1e-1):
        weights = perturbed_minimum(train, sign, epsilon, strength, random)
        found.append(float(((held_out @ weights > 0) == (data.y.numpy() == 1)).mean()))
    return round(max(found), 4)


def with_constant(x: torch.Tensor) -> np.ndarray:
    """The rows with a constant input of 1."""
    return np.concatenate([x.double().numpy(), np.ones((len(x), 1))], 1)


def perturbed_minimum(
    x: np.ndarray, sign: np.ndarray, epsilon: float, strength: float, random: np.random.Generator
) -> np.ndarray:
    """The minimum of the logistic loss and a random linear term (Chaudhuri, Monteleoni and Sarwate, 2011, algorithm 2).

    diffprivlib's logistic regression uses this algorithm. Rows of x have norm at most 1; a sign of 0 leaves a row out.
    """
    n, d, curvature = len(x), x.shape[1], 0.25
    left = epsilon - math.log(1 + 2 * curvature / (n * strength) + (curvature / (n * strength)) ** 2)
    more = 0.0
    if left <= 0:
        more, left = curvature / (n * (math.exp(epsilon / 4) - 1)) - strength, epsilon / 2
    direction = random.standard_normal(d)
    linear = direction / np.linalg.norm(direction) * random.gamma(d, 2 / left)

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = sign * (x @ weights)
        loss = np.logaddexp(0, -margin).mean() + linear @ weights / n + (strength + more) / 2 * weights @ weights
        slope = -(sign * special.expit(-margin)) @ x / n
        return float(loss), slope + linear / n + (strength + more) * weights

    return np.asarray(optimize.minimize(objective, np.zeros(d), jac=True, method="L-BFGS-B").x)


def most_frequent(data: Prepared) -> float:
    """The share of the most frequent label among the held-out rows."""
    return round(float(data.y[data.y >= 0].bincount().max() / len(data.y)), 4)


def written(rows: Sequence[Row], seeds: int, delta: float) -> str:
    """The results as Markdown."""
    lines = [
        f"Accuracy in percent on held-out rows, mean and standard deviation over up to {seeds} seeds, delta {delta:g}.",
        "",
        "| table | epsilon | run | accuracy |",
        "|---|---|---|---|",
    ]
    for row in rows:
        values = [100 * each for each in row["accuracies"]]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        lines.append(f"| {row['table']} | {row['epsilon']:g} | {row['run']} | {statistics.mean(values):.1f}{spread} |")
    return "\n".join(lines) + "\n"
