"""Accuracy with noised running statistics on MNIST, next to public statistics and to no batch norm.

`python -m experiments noised-statistics --data DIR` writes results/table.json and results/table.md beside this
file. A small network, 400 steps, accuracy on the last 10,000 training images, which are held out: the test part is not
read. `--steps` and `--seeds` make it shorter or longer.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, NoisedStatistics, PerExample, Private, layers, make_private
from experiments import data
from experiments.harness.command import parser_of

HERE = Path(__file__).parent
BATCH_SIZE, PUBLIC, HELD_OUT = 512, 1000, 10_000
# Under Batch: microbatches, noise multiplier, rule. All with C = 1 and momentum SGD at 0.05.
BY_MICROBATCH = [
    (64, 0.7, NoisedStatistics()),
    (64, 0.7, NoisedStatistics(max_norm=0.1)),
    (64, 0.7, NoisedStatistics(max_norm=2.0)),
    (16, 0.7, NoisedStatistics()),
]
# Under PerExample, with C = 0.5 and noise multiplier 1: the kind of norm, and the learning rates to try.
NORMS = ("none", "group", "public-exact", "released")
RATES = (1.0, 2.0, 4.0)


def main(arguments: Sequence[str]) -> None:
    """Run everything and write the results."""
    options = parser_of("python -m experiments noised-statistics", __doc__)
    options.add_argument("--data", default=None, help="the folder of the data sets")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--out", type=Path, default=HERE / "results")
    given = options.parse_args(arguments)
    x, y = data.images("mnist", True, given.data).tensors
    x = x.float().flatten(1) / float(x.max())
    seeds = range(given.seeds)
    result: dict[str, Any] = {"torch": torch.__version__, "steps": given.steps, "by_microbatch": [], "by_example": []}
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *(("by_microbatch", partial(by_microbatch, x, y, *row, seeds, given.steps)) for row in BY_MICROBATCH[:1]),
        *(("by_example", partial(by_example, x, y, norm, seeds, given.steps)) for norm in NORMS),
        *(("by_microbatch", partial(by_microbatch, x, y, *row, seeds, given.steps)) for row in BY_MICROBATCH[1:]),
    ]
    for table, run in rows:  # written after each row, so that a stopped command keeps its results
        result[table].append(run())
        (given.out / "table.json").write_text(json.dumps(result, indent=1) + "\n")
        (given.out / "table.md").write_text(written(result))
    print(written(result))


def network(seed: int, bias: bool = False) -> nn.Sequential:
    """784, 64, 32 and 10 units, with batch norm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, 64, bias=bias),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 32, bias=bias),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def by_microbatch(
    x: Tensor, y: Tensor, microbatches: int, z: float, rule: NoisedStatistics, seeds: range, steps: int
) -> dict[str, Any]:
    """One rule of noised statistics, and the accuracy of the same weights with public statistics."""
    runs = []
    for seed in seeds:
        start = time.perf_counter()
        model = network(seed)
        layers.without_running_statistics(model)
        clipping = Batch(1.0, microbatches, running_statistics=rule)
        private = train(model, x, y, steps, torch.optim.SGD(model.parameters(), 0.05, 0.9), clipping, z)
        found = {"released": accuracy(model, x, y)}
        own = [norm.running_mean.clone() for norm in model if isinstance(norm, layers.BatchStatisticsNorm)]
        layers.recompute_statistics(model, [x[-HELD_OUT - PUBLIC : -HELD_OUT]])
        private.declare_update("public", "statistics of batch norm from held-out rows, taken as public")
        found["public"] = accuracy(model, x, y)
        found["mean_off_by"] = distance(model, own)
        found |= {"epsilon": private.spent(1e-5).epsilon, "seconds": round(time.perf_counter() - start, 1)}
        runs.append(found)
    return {"microbatches": microbatches, "noise_multiplier": z, **rule.describe(), "runs": runs}


def by_example(x: Tensor, y: Tensor, norm: str, seeds: range, steps: int) -> dict[str, Any]:
    """One kind of norm under per-example clipping, at each rate."""
    found = {}
    for rate in RATES:
        accuracies = []
        for seed in seeds:
            model = network(seed, bias=norm == "none")
            rule = NoisedStatistics() if norm == "released" else None
            if norm == "released":
                layers.with_released_statistics(model)
            elif norm == "none":
                model = nn.Sequential(*(m for m in model if not isinstance(m, nn.BatchNorm1d)))
            else:
                public = x[-HELD_OUT - PUBLIC : -HELD_OUT] if norm == "public-exact" else None
                layers.replace_batchnorm(model, public, kind=norm)
            optimizer = torch.optim.SGD(model.parameters(), rate)
            train(model, x, y, steps, optimizer, PerExample(0.5, running_statistics=rule), 1.0)
            accuracies.append(accuracy(model, x, y))
        found[str(rate)] = accuracies
    return {"norm": norm, "accuracies_by_rate": found}


def train(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, optimizer: torch.optim.Optimizer, clipping: Any, z: float
) -> Private:
    """`steps` private steps on all images except the public and the held-out ones."""
    rows = slice(0, len(x) - HELD_OUT - PUBLIC)
    dataset = TensorDataset(x[rows], y[rows])
    private = make_private(model, optimizer, dataset, clipping=clipping, batch_size=BATCH_SIZE, noise_multiplier=z)
    while private.steps < steps:
        for images, labels in private.loader.pieces():
            losses = F.cross_entropy(model(images), labels, reduction="none") if len(images) else None
            private.step(losses)
            if private.steps == steps:
                break
    return private


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy on the held-out images."""
    model.eval()
    return round(float((model(x[-HELD_OUT:]).argmax(1) == y[-HELD_OUT:]).float().mean()), 4)


def distance(model: nn.Module, means: list[Tensor]) -> float:
    """The root mean square over channels of released minus public means, in standard deviations."""
    norms = [norm for norm in model if isinstance(norm, layers.BatchStatisticsNorm)]  # type: ignore[attr-defined]
    off = [(a - n.running_mean) / n.running_var.sqrt() for a, n in zip(means, norms, strict=True)]
    return round(float(torch.cat(off).square().mean().sqrt()), 3)


def written(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"Batch clipping, {result['steps']} steps, batches of {BATCH_SIZE}; epsilon at delta = 1e-5.",
        "",
        "| microbatches | z | epsilon | R | p | share | accuracy, released | same weights, public | mean off by |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["by_microbatch"]:
        cells = [row["microbatches"], row["noise_multiplier"], f"{row['runs'][0]['epsilon']:.2f}"]
        cells += [row["max_norm"], row["momentum"], row["share"]]
        cells += [mean_of([run[key] for run in row["runs"]]) for key in ("released", "public", "mean_off_by")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        f"Per-example clipping, {result['steps']} steps, z = 1, the best of learning rates {RATES}.",
        "",
        "| norm | rate | accuracy |",
        "|---|---:|---:|",
    ]
    for row in result["by_example"]:
        rates = row["accuracies_by_rate"]
        best = max(rates, key=lambda rate: statistics.mean(rates[rate]))
        lines.append(f"| {row['norm']} | {best} | {mean_of(rates[best])} |")
    return "\n".join([*lines, ""])


def mean_of(values: list[float]) -> str:
    """The mean, with its standard error if there are several seeds."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"
