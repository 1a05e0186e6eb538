"""The options of the suites of `python -m benchmarks`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from clipwise.errors import ConfigurationError

PAPER = "paper"
SUITES = {
    PAPER: "the figures of the fast per-example clipping paper",
    "peers": "the table of targets, beside other libraries",
    "scaling": "how the cost grows with length, batch and width",
}
_OF_SUITES = {"figures": ("paper",), "rows": ("peers", "scaling")}


@dataclass(frozen=True)
class Options:
    """The options of a suite.

    Args:
        out: the folder of the results. Results in it are not measured again.
        device: "cpu" or "cuda".
        suite: "paper", the figures of the fast per-example clipping paper; "peers", the table of targets; or
            "scaling", how the cost grows.
        figures: names of figures of the paper; all if empty.
        rows: names of rows of the table of targets, or of axes of "scaling"; all if empty.
        methods: names of methods; all installed ones if empty.
        quick: measure a few small settings in few rounds, to check that the suite runs.
        budget_seconds: start no measurement after this time.
        cell_seconds: approximate limit for one measurement.
        seed: seed of weights, data and the order of batches.
        retry: measure failed cells again.
        cpu_time: time steps by the processor time of the process; for the CPU only.
    """

    out: Path
    device: str = "cpu"
    suite: str = PAPER
    figures: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    quick: bool = False
    budget_seconds: float | None = None
    cell_seconds: float = 60.0
    seed: int = 0
    retry: bool = False
    cpu_time: bool = False

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise ConfigurationError(f"suite={self.suite!r} is not known: use one of {', '.join(SUITES)}.")
        for name, suites in _OF_SUITES.items():
            if getattr(self, name) and self.suite not in suites:
                known = " or ".join(map(repr, suites))
                raise ConfigurationError(f"{name} belong to suite={known}, not to {self.suite!r}.")
        if self.cpu_time and self.device != "cpu":
            raise ConfigurationError("cpu_time is for the CPU: on a GPU the processor waits.")
        for name in ("budget_seconds", "cell_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be a positive number of seconds, not {value!r}.")

    @property
    def command(self) -> str:
        """The command with these options, without the folder."""
        words = ["python", "-m", "benchmarks"]
        words += [self.suite] if self.suite != PAPER else []
        words += ["--device", self.device]
        for option, names in (("--figure", self.figures), ("--row", self.rows), ("--method", self.methods)):
            for name in names:
                words += [option, name]
        words += ["--quick"] if self.quick else []
        words += ["--cpu-time"] if self.cpu_time else []
        words += ["--cell-seconds", f"{self.cell_seconds:g}", "--seed", str(self.seed)]
        return shlex.join(words)
