"""`clipwise bench`: measure what is missing of the grid, then write tables and plots."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clipwise.bench.cell import Cell, measure, measure_largest
from clipwise.bench.environment import device_of, environment
from clipwise.bench.grid import Figure, figures
from clipwise.bench.limits import Deadline
from clipwise.bench.methods import ONE_BY_ONE, available_methods
from clipwise.bench.plots import plot_all
from clipwise.bench.results import Results, key_of
from clipwise.bench.tables import markdown
from clipwise.bench.timing import Effort
from clipwise.bench.workload import Setting
from clipwise.errors import ConfigurationError

Say = Callable[[str], None]
TABLES = "results.md"
_QUICK_CELL_SECONDS = 4.0


@dataclass(frozen=True)
class Options:
    """What was asked for; the same on both command lines.

    Args:
        out: the folder of the results. What is there is not measured again.
        device: "cpu" or "cuda".
        figures: by name; none is all.
        methods: by name; none is all that are installed.
        quick: a few small settings and few rounds: shows that it works, not how fast.
        budget_seconds: begin nothing after this time, and keep what is measured.
        cell_seconds: about the most for one measurement.
        seed: of weights, data and the order of batches.
        retry: measure again what failed.
    """

    out: Path
    device: str = "cpu"
    figures: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    quick: bool = False
    budget_seconds: float | None = None
    cell_seconds: float = 60.0
    seed: int = 0
    retry: bool = False

    def __post_init__(self) -> None:
        for name in ("budget_seconds", "cell_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be a positive number of seconds, not {value!r}.")

    @property
    def command(self) -> str:
        """The command that asks for this, without the folder."""
        words = ["clipwise", "bench", "--device", self.device]
        for figure in self.figures:
            words += ["--figure", figure]
        for method in self.methods:
            words += ["--method", method]
        words += ["--quick"] if self.quick else []
        words += ["--cell-seconds", f"{self.cell_seconds:g}", "--seed", str(self.seed)]
        return shlex.join(words)


@dataclass(frozen=True)
class _Job:
    figure: Figure
    setting: Setting
    method: str

    @property
    def key(self) -> str:
        return key_of(self.setting.key, self.method, largest=self.figure.largest_batch)


def bench(options: Options, say: Say) -> None:
    """Measure what is missing, in the declared order, and write JSON, Markdown and plots."""
    device = device_of(options.device)
    jobs = list(_jobs(options, device))
    conditions = environment(device) | {"quick": options.quick}
    results = Results.go_on(options.out, conditions)
    results.begin(options.command, options.seed)
    missing = [job for job in jobs if not results.has(job.key, retry=options.retry)]
    say(f"{len(missing)} cells to measure, {len(jobs) - len(missing)} are there")
    deadline = Deadline(options.budget_seconds)
    for number, job in enumerate(missing, 1):
        cell = _measure(job, device, options, deadline.left()) if deadline.left() > 0 else None
        if cell is None or (deadline.left() <= 0 and "failed" in cell):  # cut short by us: no result
            say(f"the time is up: {len(missing) - number + 1} cells are left for another run")
            break
        results.add(job.key, cell)
        say(f"[{number}/{len(missing)}] {job.key}: {_in_short(cell)}")
    _write(results, options.out, say, must_plot=False)


def render(folder: Path, say: Say) -> None:
    """Write tables and plots from the results in a folder, without measuring."""
    _write(Results.read(folder), folder, say, must_plot=True)


def _jobs(options: Options, device: torch.device) -> Iterator[_Job]:
    """Every cell once, in the order of the grid: figures share settings."""
    seen = set()
    for figure in figures(options.figures):
        for setting in figure.chosen(device.type, options.quick):
            for method in available_methods(options.methods):
                job = _Job(figure, setting, method)
                endless = figure.largest_batch and method == ONE_BY_ONE  # its memory is that of one example
                if job.key not in seen and not endless:
                    seen.add(job.key)
                    yield job


def _measure(job: _Job, device: torch.device, options: Options, seconds_left: float) -> Cell:
    most = min(2 * options.cell_seconds, seconds_left)
    if job.figure.largest_batch:
        return measure_largest(job.setting, job.method, device, options.seed, most)
    most_for_cell = min(options.cell_seconds, seconds_left)
    effort = Effort(cell_seconds=most_for_cell)
    if options.quick:
        effort = Effort(3, enough_seconds=0.3, cell_seconds=min(most_for_cell, _QUICK_CELL_SECONDS))
    return measure(job.setting, job.method, device, options.seed, effort, most)


def _write(results: Results, folder: Path, say: Say, *, must_plot: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TABLES).write_text(markdown(results))
    say(f"wrote {folder / TABLES}")
    if must_plot or importlib.util.find_spec("matplotlib") is not None:
        for file in plot_all(results, folder):
            say(f"wrote {file}")
    else:
        say("plots are left out: install clipwise[plots], then `clipwise bench --render` with this folder")


def _in_short(cell: Cell) -> str:
    if "failed" in cell:
        return str(cell["failed"])
    if "largest_batch" in cell:
        return f"largest batch {cell['largest_batch']}"
    return f"{1000 * cell['seconds']:.2f} ms, {cell['ratio']:.2f} x non-private"
