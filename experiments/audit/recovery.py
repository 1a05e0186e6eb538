"""How much of a known mu the attacks recover: `python -m experiments audit/recovery`.

It writes a table in docs/concepts/audit.md.

One release of per-example clipping over all records: the true value is mu = 1 / z.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipwise import PerExample, audit
from clipwise.audit.report import AuditReport
from clipwise.audit.trial import run_of
from experiments.harness.command import parser_of
from experiments.harness.training import losses_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "audit.md"
PLACE = re.compile(r"(<!-- recovery -->\n).*?(<!-- end of recovery -->)", re.DOTALL)
RECORDS, FEATURES, CLASSES = 500, 60, 10


def release(mu: float) -> tuple[Callable[[Any], None], Any]:
    """One step of a linear model on random records."""
    torch.manual_seed(0)
    rows = torch.randn(RECORDS, FEATURES), torch.randint(CLASSES, (RECORDS,))
    clipping = PerExample(1.0, method="instantiate")
    options = {"sampling": "full", "sample_rate": None, "steps": 1, "noise_multiplier": 1 / mu}
    return run_of(nn.Linear(FEATURES, CLASSES), losses_of, rows, clipping, **options)


ATTACKS: dict[str, Callable[[float], AuditReport]] = {
    "Dirac canary": lambda mu: audit.canary(*release(mu), runs=1000),
    "mislabelled canary": lambda mu: audit.canary(*release(mu), kind="mislabelled", loss=losses_of, runs=1000),
    "one run, 500 canaries": lambda mu: audit.one_run(*release(mu), canaries=RECORDS),
}


def main(arguments: Sequence[str]) -> None:
    """Measure and write."""
    parser_of("python -m experiments audit/recovery", __doc__).parse_args(arguments)  # no options
    torch.set_num_threads(1)
    lines = ["| attack | runs | mu | measured | epsilon | measured | seconds |\n", "|---" * 7 + "|\n"]
    for name, attack in ATTACKS.items():
        for mu in (1.0, 2.0, 3.0):
            start = time.perf_counter()
            report = attack(mu)
            seconds, m = time.perf_counter() - start, report.measured
            lines.append(
                f"| {name} | {m.runs:,} | {mu:g} | >= {m.mu:.2f} ({100 * m.mu / mu:.0f}%) | "
                f"{report.claim.epsilon:.2f} | >= {m.epsilon:.2f} | {seconds:.1f} |\n"
            )
    PAGE.write_text(PLACE.sub(lambda place: place[1] + "".join(lines) + place[2], PAGE.read_text()))
