"""`python -m benchmarks`: time and memory of private training beside non-private training."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.options import SUITES, Options
from benchmarks.runner import bench, render
from clipwise.cli.places import require_folder
from clipwise.errors import ClipwiseError


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suite",
        nargs="?",
        default=SUITES[0],
        help="paper: its figures; peers: the table of targets; scaling: by T, B, width",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--row", dest="rows", action="append", default=[], help="of the table, or an axis; may be repeated"
    )
    parser.add_argument("--figure", dest="figures", action="append", default=[], help="5 to 9, largest, more")
    parser.add_argument(
        "--method", dest="methods", action="append", default=[], help="a column; all if left out"
    )
    parser.add_argument("--quick", action="store_true", help="few small settings, few rounds")
    parser.add_argument("--budget-seconds", type=float, help="stop after this time; keep what is measured")
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="about the most for one measurement")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--render", type=Path, metavar="DIR", help="write tables and plots of DIR, no more")
    options = vars(parser.parse_args(arguments))
    folder, say = options.pop("render"), partial(print, flush=True)
    try:
        if folder is not None:
            render(folder, say)
        else:
            require_folder(options["out"])
            bench(Options(**options), say)
    except ClipwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
