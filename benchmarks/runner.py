"""`python -m benchmarks`: measure the missing cells of a suite, then write tables and plots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cell import Cell, measure, measure_largest
from benchmarks.grid import Figure, figures
from benchmarks.methods import ONE_BY_ONE, available_methods
from benchmarks.options import Options
from benchmarks.peers.run import SUITE as PEERS
from benchmarks.peers.run import bench_peers, write_table
from benchmarks.plots import plot_all
from benchmarks.records import TABLES, Results, key_of
from benchmarks.scaling.run import SUITE as SCALING
from benchmarks.scaling.run import bench_scaling, write_report
from benchmarks.suite import Say
from benchmarks.tables import markdown
from benchmarks.timing import Effort
from benchmarks.workload import Setting
from experiments.harness.drawing import LEFT_OUT, can_draw
from experiments.harness.environment import device_of, environment
from experiments.harness.limits import Deadline

_QUICK_CELL_SECONDS = 4.0
_SUITES_OF_ROWS = {PEERS: bench_peers, SCALING: bench_scaling}


@dataclass(frozen=True)
class _Job:
    figure: Figure
    setting: Setting
    method: str

    @property
    def key(self) -> str:
        return key_of(self.setting.key, self.method, largest=self.figure.largest_batch)


def bench(options: Options, say: Say) -> None:
    """Measure the missing cells in order, and write JSON, Markdown and plots."""
    if options.suite in _SUITES_OF_ROWS:
        _SUITES_OF_ROWS[options.suite](options, say)
        return
    device = device_of(options.device)
    jobs = list(_jobs(options, device))
    conditions = environment(device) | {"quick": options.quick}
    results = Results.go_on(options.out, conditions)
    results.begin(options.command, options.seed)
    missing = [job for job in jobs if not results.has(job.key, retry=options.retry)]
    say(f"{len(missing)} cells to measure, {len(jobs) - len(missing)} already measured")
    deadline = Deadline(options.budget_seconds)
    for number, job in enumerate(missing, 1):
        cell = _measure(job, device, options, deadline.left()) if deadline.left() > 0 else None
        if cell is None or (deadline.left() <= 0 and "failed" in cell):  # out of time: no result
            say(f"the time is up: {len(missing) - number + 1} cells are left for another run")
            break
        results.add(job.key, cell)
        say(f"[{number}/{len(missing)}] {job.key}: {_in_short(cell)}")
    _write(results, options.out, say, must_plot=False)


def render(folder: Path, say: Say) -> None:
    """Write tables and plots from the results in a folder, without measuring."""
    results = Results.read(folder)
    suite = results.environment.get("suite")
    if suite == PEERS:
        write_table(results, folder)
        say(f"wrote {folder / TABLES}")
    elif suite == SCALING:
        write_report(results, folder, say, must_plot=True)
    else:
        _write(results, folder, say, must_plot=True)


def _jobs(options: Options, device: torch.device) -> Iterator[_Job]:
    """Each cell once, in the order of the grid. Figures share settings."""
    seen = set()
    for figure in figures(options.figures):
        for setting in figure.chosen(device.type, options.quick):
            for method in available_methods(options.methods):
                job = _Job(figure, setting, method)
                endless = figure.largest_batch and method == ONE_BY_ONE  # memory of one example
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
    if must_plot or can_draw():
        for file in plot_all(results, folder):
            say(f"wrote {file}")
    else:
        say(LEFT_OUT)


def _in_short(cell: Cell) -> str:
    if "failed" in cell:
        return str(cell["failed"])
    if "largest_batch" in cell:
        return f"largest batch {cell['largest_batch']}"
    return f"{1000 * cell['seconds']:.2f} ms, {cell['ratio']:.2f} x non-private"
