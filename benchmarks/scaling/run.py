"""`python -m benchmarks scaling`: measure the missing points, and write tables and plots."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.methods import AUTO, COMPILED, REFERENCE, REWEIGHT, unavailable
from benchmarks.options import Options
from benchmarks.records import TABLES, Results
from benchmarks.scaling.axes import axes_for
from benchmarks.scaling.plots import plot_all
from benchmarks.scaling.table import markdown
from benchmarks.suite import Say, chosen_columns, measure_missing, write_text
from benchmarks.timing import Effort
from experiments.harness.drawing import LEFT_OUT, can_draw
from experiments.harness.environment import device_of

SUITE = "scaling"
_EFFORT = Effort(
    15, least_rounds=5, enough_seconds=1.0
)  # fewer rounds: there are many points, and neighbours confirm each other


def bench_scaling(options: Options, say: Say) -> None:
    """Measure the missing points axis by axis; print the tables, and write JSON, Markdown and plots."""
    device = device_of(options.device)
    axes = axes_for(device.type, quick=options.quick, wanted=options.rows)
    rows = [row for axis in axes for row in axis.rows.values()]
    columns = chosen_columns(options.methods, usual_columns(device))
    results = measure_missing(rows, columns, device, options, _EFFORT, write_table, say)
    say("\n" + write_table(results, options.out))
    write_report(results, options.out, say, must_plot=False)


def usual_columns(device: torch.device) -> set[str]:
    """Plain training and the methods of clipwise on this device."""
    return {name for name in (REFERENCE, AUTO, REWEIGHT, COMPILED) if unavailable(name, device) is None}


def write_table(results: Results, folder: Path) -> str:
    """Write the report; returns it."""
    return write_text(folder / TABLES, markdown(results))


def write_report(results: Results, folder: Path, say: Say, *, must_plot: bool) -> None:
    """Write tables, and plots if matplotlib is installed."""
    write_table(results, folder)
    say(f"wrote {folder / TABLES}")
    if not must_plot and not can_draw():
        say(LEFT_OUT)
        return
    for file in plot_all(results, folder):
        say(f"wrote {file}")
