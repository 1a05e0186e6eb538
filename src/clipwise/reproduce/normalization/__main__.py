"""`python -m clipwise.reproduce.normalization`: the same command, with the standard library's parser."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from clipwise.errors import ClipwiseError
from clipwise.reproduce.normalization.runner import Options, reproduce


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m clipwise.reproduce normalization", description=__doc__)
    parser.add_argument("--table", dest="tables", action="append", default=[], help="2 to 7, or 6-scratch")
    parser.add_argument("--figure", dest="figures", action="append", default=[], help="1")
    parser.add_argument("--data", type=Path, help="folder of data sets; if left out, CLIPWISE_DATA names it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, help="runs of each entry, in place of what a table has")
    parser.add_argument("--quick", action="store_true", help="small data: shows that it works, not how well")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each in its own process")
    parser.add_argument("--budget-seconds", type=float, help="stop after this time; keep what is finished")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--out", type=Path, default=Path("runs/normalization"), help="folder of the results")
    given = vars(parser.parse_args(arguments))
    given |= {name: tuple(given[name]) for name in ("tables", "figures")}
    try:
        reproduce(Options(**given), partial(print, flush=True))
    except ClipwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
