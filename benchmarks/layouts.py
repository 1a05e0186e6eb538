"""What finding the layout of the examples costs in a steady step, where operations move rows or write in place.

    python -m benchmarks layouts [--case TITLE] [--hand-written] [--json FILE]

A layout that has to be measured in every batch costs extra backward passes. Each case is a small network. Its private
step (`next(loader)`, forward, `private.step`) and its plain step are timed in turns, by the processor time of the
process. The table has the median of the ratios, whether steady steps were probed, and the time of the first step.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import TensorDataset

from benchmarks.networks.moved import Case, hand_written
from benchmarks.timing import Effort, interleave, settled
from clipwise import PerExample, make_private
from clipwise.gradients.resolve import Resolver
from experiments.harness.command import parser_of
from experiments.harness.environment import environment
from experiments.harness.limits import reason_of

BATCH = 32
_SETTLING = 8  # steps that are not counted
_MOST_SECONDS = 60.0


def _nothing() -> None:
    """There is no device to wait for."""


def measured(make: Callable[[], Case], seed: int, effort: Effort) -> dict[str, Any]:
    """The figures of one case, or the reason why it has none."""
    torch.manual_seed(seed)
    case = make()
    data = TensorDataset(*case.inputs(4 * BATCH))
    model, twin = case.model, make().model
    torch.seed()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, twin))
    batches = (
        tuple(t[i : i + BATCH] for t in data.tensors) for i in chain.from_iterable(repeat(range(0, 4 * BATCH, BATCH)))
    )

    def plain() -> None:
        plain_optimizer.zero_grad()
        torch.autograd.backward(case.losses(twin, next(batches)).mean())
        plain_optimizer.step()

    probes = 0

    def probe(resolver: Resolver, graph: Any, original: Any = Resolver.probe) -> Any:
        nonlocal probes
        probes += 1
        return original(resolver, graph)

    with (
        patch.object(Resolver, "probe", probe),
        warnings.catch_warnings(record=True) as caught,
        make_private(model, optimizer, data, batch_size=BATCH, sampling="shuffled", noise_multiplier=1.0,
                     clipping=PerExample(max_norm=1.0)) as private,
    ):  # fmt: skip
        warnings.simplefilter("always")
        drawn = chain.from_iterable(repeat(private.loader))
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            private.step(case.losses(model, tuple(next(drawn))))

        warm = partial(settled, most_seconds=_MOST_SECONDS, wait=_nothing)
        contenders = {"plain": warm(plain, 3), "private": warm(step, _SETTLING)}
        before = steps, probes
        rounds = interleave(contenders, effort, _nothing)
        timing = rounds.timing("private", "plain")
        return {
            "ratio": timing.ratio,
            "plain_ms": timing.reference_seconds * 1e3,
            "probed": (probes - before[1]) / (steps - before[0]),
            "warnings": sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)}),
        }


def main(arguments: Sequence[str]) -> None:
    """Measure all cases and print the table."""
    parser = parser_of("python -m benchmarks layouts", __doc__)
    parser.add_argument("--case", dest="cases", action="append", default=[], help="a title; may be repeated")
    parser.add_argument("--hand-written", action="store_true", help="without the models of `transformers`")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case, about")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    options = parser.parse_args(arguments)
    cases = hand_written()
    if not options.hand_written:
        from benchmarks.networks.published import published

        cases |= published()
    effort = Effort(rounds=25, enough_seconds=options.seconds, cell_seconds=_MOST_SECONDS, cpu_time=True)
    found: dict[str, Any] = {}
    print("| case | plain ms | private / plain | probed steps | warnings |\n|---|---|---|---|---|", flush=True)
    for title, make in cases.items():
        if options.cases and title not in options.cases:
            continue
        try:
            found[title] = cell = measured(make, options.seed, effort)
            words = "; ".join(text.partition(":")[0][:60] for text in cell["warnings"])
            figures = f"{cell['plain_ms']:.1f} | {cell['ratio']:.2f} | {cell['probed']:.0%}"
            print(f"| {title} | {figures} | {words} |", flush=True)
        except Exception as error:
            found[title] = {"failed": reason_of(error)}
            print(f"| {title} | | {reason_of(error)} | | |", flush=True)
    if options.json is not None:
        device = torch.device("cpu")
        options.json.write_text(json.dumps({"environment": environment(device), "cases": found}, indent=1) + "\n")
