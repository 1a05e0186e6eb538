"""`python -m benchmarks peers`: measure the missing rows, and write the table after each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.methods import INDUCTOR, OPACUS, PLAIN_COMPILED
from benchmarks.options import Options
from benchmarks.peers.rows import rows_for
from benchmarks.peers.table import COLUMNS, markdown
from benchmarks.records import TABLES, Results
from benchmarks.suite import Say, chosen_columns, measure_missing, write_text
from benchmarks.timing import Effort
from experiments.harness.environment import device_of

SUITE = "peers"
SLOW = {*OPACUS, INDUCTOR, PLAIN_COMPILED}  # Opacus takes long, and so does compiling; only on a GPU by default
USUAL = set(COLUMNS) - SLOW
_EFFORT = Effort(30, least_rounds=5, enough_seconds=5.0)


def bench_peers(options: Options, say: Say) -> None:
    """Measure the missing rows in the order of the table; print it, and write JSON and Markdown."""
    device = device_of(options.device)
    rows = rows_for(device.type, quick=options.quick, wanted=options.rows)
    usual = USUAL if device.type == "cpu" or options.quick else USUAL | {INDUCTOR, PLAIN_COMPILED}
    columns = chosen_columns(options.methods, usual)
    effort = replace(_EFFORT, cpu_time=options.cpu_time)
    results = measure_missing(rows, columns, device, options, effort, write_table, say)
    say("\n" + write_table(results, options.out))
    say(f"wrote {options.out / TABLES}")


def write_table(results: Results, folder: Path) -> str:
    """Write the report; returns it."""
    return write_text(folder / TABLES, markdown(results))
