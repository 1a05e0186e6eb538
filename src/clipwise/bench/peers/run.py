"""`clipwise bench --suite peers`: measure the rows that are missing, and write the table after each."""

from __future__ import annotations

from pathlib import Path

from clipwise.bench.environment import device_of
from clipwise.bench.methods import OPACUS
from clipwise.bench.options import Options
from clipwise.bench.peers.rows import rows_for
from clipwise.bench.peers.table import COLUMNS, markdown
from clipwise.bench.results import TABLES, Results
from clipwise.bench.suite import Say, chosen_columns, measure_missing, write_text
from clipwise.bench.timing import Effort

SUITE = "peers"
USUAL = set(COLUMNS) - set(OPACUS)  # which takes long
_EFFORT = Effort(30, least_rounds=5, enough_seconds=5.0)


def bench_peers(options: Options, say: Say) -> None:
    """Measure what is missing, in the order of the table; print it, and write JSON and Markdown."""
    device = device_of(options.device)
    rows = rows_for(device.type, quick=options.quick, wanted=options.rows)
    columns = chosen_columns(options.methods, USUAL)
    results = measure_missing(rows, columns, device, options, _EFFORT, write_table, say)
    say("\n" + write_table(results, options.out))
    say(f"wrote {options.out / TABLES}")


def write_table(results: Results, folder: Path) -> str:
    """Write the report; returns it."""
    return write_text(folder / TABLES, markdown(results))
