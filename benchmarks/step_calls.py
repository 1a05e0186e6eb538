"""How long the path of one steady eager step is: which files of clipwise take part, and how often one calls another.

    python -m benchmarks step-calls [--json FILE]

An MLP is trained with PerExample, Poisson sampling and a ledger file. After some warm-up steps some are traced:
`next(loader)`, forward, `private.step`. Batches of different sizes take different ways, so the figures are those of
the step with the median number of calls. A call counts if caller and callee are in different files of clipwise;
comprehensions and generators count as part of the function that they are in, calls by torch as made by the
function of clipwise that called torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clipwise
from experiments.harness.command import parser_of

_ROOT = Path(clipwise.__file__).parent
_WARM_UP = 10
_TRACED = 15


class Calls:
    """Files that take part, and calls from one file to another, while it is the interpreter's profile function."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()  # calls of their functions from other files
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._file_of: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call. The signature is that of `sys.setprofile`."""
        if event != "call" or (file := self._file(frame)) is None:
            return
        self.files[file] += 0
        caller = frame.f_back
        while caller is not None and self._file(caller) is None:
            caller = caller.f_back
        before = None if caller is None else self._file(caller)
        if before is not None and before != file:
            self.files[file] += 1
            self.pairs[before, file] += 1

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._file_of:
            path = Path(name)
            self._file_of[name] = str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else None
        return self._file_of[name]


def traced_step() -> Calls:
    """The calls of the median step of a run that has settled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    data = TensorDataset(torch.randn(1000, 20), torch.randint(0, 5, (1000,)))
    torch.seed()  # a seed by hand would be looked into at every step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traced = [Calls() for _ in range(_TRACED)]
    with (
        tempfile.TemporaryDirectory() as folder,
        clipwise.make_private(
            model,
            optimizer,
            data,
            batch_size=25,
            noise_multiplier=1.0,
            clipping=clipwise.PerExample(max_norm=1.0),
            ledger=Path(folder, "run.ledger"),
        ) as private,
    ):
        batches = iter(private.loader)

        def step() -> None:
            x, y = next(batches)
            private.step(F.cross_entropy(model(x), y, reduction="none"))

        for _ in range(_WARM_UP):
            step()
        for calls in traced:
            sys.setprofile(calls)
            try:
                step()
            finally:
                sys.setprofile(None)
    return sorted(traced, key=lambda calls: calls.pairs.total())[_TRACED // 2]


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    parser = parser_of("python -m benchmarks step-calls", __doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    calls = traced_step()
    print(f"{len(calls.files)} files of clipwise take part in a step; {calls.pairs.total()} calls between files")
    print("\ncalls into each file")
    for file, count in calls.files.most_common():
        print(f"{count:5} {file}")
    print("\ncalls from one file to another")
    for (before, file), count in calls.pairs.most_common():
        print(f"{count:5} {before} -> {file}")
    if options.json is not None:
        found = {"files": len(calls.files), "calls": calls.pairs.total()}
        options.json.write_text(json.dumps(found) + "\n")
