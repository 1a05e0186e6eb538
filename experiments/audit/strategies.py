"""Claimed and measured privacy of each strategy: `python -m experiments audit/strategies`.

Writes results/strategies.json beside this file and the table in docs/concepts/audit.md. `--only NAME` measures one
row again and keeps the others; `--runs` and `--sampled-runs` set the number of runs. Several minutes on two cores.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import Backprop, Batch, Lipschitz, NoisedStatistics, PerExample, Private, audit, layers
from clipwise.audit.bounds import mu_of_accuracy
from clipwise.audit.trial import CHANGES, run_of
from clipwise.clipping import Strategy
from experiments.harness.command import parser_of
from experiments.harness.training import losses_of

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "strategies.json"
PAGE = HERE.parents[1] / "docs" / "concepts" / "audit.md"
PLACE = re.compile(r"(<!-- strategies -->\n).*?(<!-- end of strategies -->)", re.DOTALL)
CONFIDENCE = 0.999  # so that none of some twenty bounds should be above the truth by chance
RECORDS, FEATURES, CLASSES = 32, 5, 3


def rows(seed: int = 0, size: int = RECORDS) -> tuple[Tensor, Tensor]:
    """Random records."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, FEATURES, generator=random), torch.randint(CLASSES, (size,), generator=random)


def weighted_losses(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """One loss per example, times the weight of the record."""
    return w * losses_of(model, x, y)


def step_at_outputs(private: Private, model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> bool:
    """A step of weight clipping, which also takes the model's outputs."""
    outputs = model(x)
    return private.step(w * F.cross_entropy(outputs, y, reduction="none"), outputs=outputs)


def quiet_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Random records with small weights, so that the canary stands out."""
    return (*rows(), torch.full((RECORDS,), 1e-3))


def loud(x: Tensor) -> dict[str, Any]:
    """An attack with a record of such a large weight that its gradient is clipped to the bound."""
    record = (x, torch.tensor(1), torch.tensor(1e4))
    return {"kind": "record", "planted": record, "loss": weighted_losses}


def plain() -> nn.Module:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def normalized() -> nn.Sequential:
    """The same with batch norm in between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def public_norm() -> nn.Module:
    """Statistics from public rows."""
    return layers.replace_batchnorm(normalized(), rows(seed=1, size=64)[0], "public")[0]


def lot_norm() -> nn.Module:
    """Statistics of each batch, none kept: for batch clipping alone."""
    return layers.without_running_statistics(normalized())


def isometric() -> nn.Module:
    """Orthogonal weights, with which a record can reach all bounds of weight clipping at once."""
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))
    torch.manual_seed(0)
    for layer in (model[1], model[3]):
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def all_positive() -> Tensor:
    """An input that the first of those layers maps to equal, positive values, so that ReLU changes nothing."""
    weight: Tensor = isometric()[1].weight.detach()
    return weight.T @ torch.ones(FEATURES)


def clipped() -> nn.Module:
    """Two layers that clip their inputs and upstream gradients."""
    return layers.clip_inputs(plain(), input_norm=0.5, grad_norm={"0": 0.1, "2": 1.0})


@dataclass(frozen=True)
class Row:
    """One strategy and its attack.

    Args:
        name: its name in the table.
        clipping: the strategy.
        model: the model.
        losses: one loss per example.
        batch: the records.
        options: further arguments of `run_of` (`step=` for a strategy that needs more than losses).
        attack: further arguments of `audit.canary`.
        sampled: how batches are drawn in the run of several steps.
    """

    name: str
    clipping: Callable[[], Strategy]
    model: Callable[[], nn.Module] = plain
    losses: Callable[..., Tensor] = losses_of
    batch: Callable[[], tuple[Tensor, ...]] = rows
    options: Mapping[str, Any] = field(default_factory=dict)
    attack: Mapping[str, Any] = field(default_factory=dict)
    sampled: Mapping[str, Any] = field(default_factory=lambda: {"sampling": "poisson", "sample_rate": 0.25})


FIXED_SIZE = {"sampling": "fixed-size", "sample_rate": None, "batch_size": RECORDS // 4}
# "vmap" is the fastest method for so small a model.
STRATEGIES = [
    Row("PerExample", lambda: PerExample(1.0, method="vmap")),
    Row("PerExample, one part per layer", lambda: PerExample(1.0, parts="layer", method="vmap")),
    Row("PerExample, normalize", lambda: PerExample(1.0, mode="normalize", method="vmap")),
    Row("PerExample, fixed-size batches", lambda: PerExample(1.0, method="vmap"), sampled=FIXED_SIZE),
    Row("PerExample, public batch norm", lambda: PerExample(1.0, method="vmap"), public_norm),
    Row("Batch", lambda: Batch(1.0), lot_norm),
    Row("Batch, 4 microbatches", lambda: Batch(1.0, microbatches=4), sampled=FIXED_SIZE),
    Row("Batch, noised statistics", lambda: Batch(1.0, running_statistics=NoisedStatistics()), lot_norm),
    Row(
        "Lipschitz",
        lambda: Lipschitz(max_weight_norm=1.0, input_norm=1.0),
        isometric,
        weighted_losses,
        quiet_rows,
        options={"step": step_at_outputs},
        attack=loud(all_positive()),
    ),
    Row("Backprop", Backprop, clipped, weighted_losses, quiet_rows, attack=loud(torch.full((FEATURES,), 50.0))),
]


def measured(row: Row, runs: int, sampled_runs: int, seed: int) -> dict[str, Any]:
    """The neighbour check, one release over all records, and a run of eight sampled steps."""
    start = time.perf_counter()
    few = {"sampling": "full", "sample_rate": None, "steps": 1, "noise_multiplier": 1.0}
    many = {**row.sampled, "steps": 8, "noise_multiplier": 0.6}
    subjects = [
        run_of(
            row.model(), row.losses, row.batch(), row.clipping(), probe_independence=False, **{**chosen, **row.options}
        )
        for chosen in (few, many)
    ]
    planted = {"planted": lambda record: row.attack.get("planted", record)}
    compared = audit.neighbours(*subjects[1], records=(0, 1), changes={**CHANGES, **planted})
    attacks = [
        audit.canary(*subject, runs=count, confidence=CONFIDENCE, seed=seed, **row.attack).to_dict()
        for subject, count in zip(subjects, (runs, sampled_runs), strict=True)
    ]
    return {
        "name": row.name,
        "neighbours": {"ok": compared.ok, "worst": compared.worst},
        "one release": attacks[0],
        "run": attacks[1],
        "seconds": round(time.perf_counter() - start, 1),
    }


def as_markdown(found: list[dict[str, Any]]) -> str:
    """The section of the page."""
    lines = [
        "## Measured",
        "",
        "`python -m experiments audit/strategies` writes this table (several minutes on two cores). Each bound holds "
        f'with confidence {CONFIDENCE:g}, delta is 1e-5, and "runs" are those with the canary, which are as many as '
        'those without. "One release": noise multiplier 1, every record takes part, and mu = 1 is the true value. '
        '"Run": 8 steps at noise multiplier 0.6, a quarter of 32 records in each. "Reachable" is the mu that the best '
        'guess of "in" or "out" can show of such a run if the claim is tight: the claimed mu is reached only by '
        "guesses that are made rarely, with more certainty. Neighbours: the largest observed change, relative to the "
        "allowed one.",
        "",
        "The canary is a Dirac canary. Lipschitz and Backprop bound gradients inside the network, which a Dirac canary "
        "would bypass. There the canary is a record with a loss so large that its gradient is clipped to the bound. "
        "Its input is chosen for the weights (Lipschitz: no layer shortens it), and the other records have small "
        "gradients. Noised statistics have a tenth of the privacy of a step, and the canary uses the gradient only: "
        "sqrt(0.9) = 0.95 is the most that it can show of mu = 1.",
        "",
        "| strategy | neighbours | one release: mu | runs | run: epsilon claimed | measured | mu claimed "
        "| reachable | measured | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        one, run = row["one release"], row["run"]
        cells = [
            row["name"],
            f"{row['neighbours']['worst']:.3f}" if row["neighbours"]["ok"] else "NOT AS DECLARED",
            f">= {one['measured']['mu']:.2f} of {one['claimed']['mu']:.2f}",
            f"{one['measured']['runs']:,}",
            f"{run['claimed']['epsilon']:.2f}",
            f">= {run['measured']['epsilon']:.2f}",
            f"{run['claimed']['mu']:.2f}",
            f"{mu_of_accuracy(run['claimed']['accuracy']):.2f}",
            f">= {run['measured']['mu']:.2f}",
            f"{run['measured']['runs']:,}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Measure and write."""
    parser = parser_of("python -m experiments audit/strategies", __doc__)
    parser.add_argument("--only", action="append", help="a row to measure; the others stay")
    parser.add_argument("--runs", type=int, default=5000, help="of one release, in each world")
    parser.add_argument("--sampled-runs", type=int, default=300, help="of several steps, in each world")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = {row["name"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for seed, row in enumerate(STRATEGIES, start=100):  # so that the rows do not share their noise
        if not asked.only or row.name in asked.only:
            known[row.name] = measured(row, asked.runs, asked.sampled_runs, seed)
            print(json.dumps(known[row.name]), flush=True)
    found = [known[row.name] for row in STRATEGIES if row.name in known]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(PLACE.sub(lambda place: place[1] + as_markdown(found) + place[2], PAGE.read_text()))
