"""Experiments on papers and on clipwise itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import require_folder
from experiments.harness.command import dispatch, parser_of
from experiments.harness.paper import asked_for
from experiments.harness.runner import Options, reproduce
from experiments.harness.store import FILE
from experiments.index import PAPERS, SCRIPTS

PROGRAM = "python -m experiments"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    papers = {name: (command.line, partial(_paper, name)) for name, command in PAPERS.items()}
    scripts = {name: (command.line, command.main) for name, command in SCRIPTS.items()}
    commands = dict(sorted((papers | scripts).items()))
    return dispatch(PROGRAM, str(__doc__), commands, sys.argv[1:] if arguments is None else arguments)


def _paper(name: str, arguments: Sequence[str]) -> None:
    parser = parser_of(f"{PROGRAM} {name}", PAPERS[name].line)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder of the results")
    parser.add_argument(
        "--figure", dest="figures", action="append", default=[], help="by name; may be repeated; all if left out"
    )
    parser.add_argument("--table", dest="tables", action="append", default=[], help="as --figure")
    parser.add_argument("--data", type=Path, help="folder of data sets; if left out, CLIPWISE_DATA names it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, help="runs per row, instead of those of a figure or table")
    parser.add_argument("--epochs", type=int, help="shorten every run to this number of epochs")
    parser.add_argument("--quick", action="store_true", help="few rows on small digits, as a check")
    parser.add_argument("--budget-seconds", type=float, help="stop after this time; can continue later")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each in its own process")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--take", type=Path, action="append", default=[], metavar="DIR", help="copy the runs of DIR")
    parser.add_argument("--only", default="", help="rows with this text in their name")
    given = vars(parser.parse_args(arguments))
    given["figures"] = asked_for(given["figures"], given.pop("tables"))
    given["take"] = tuple(given["take"])
    for folder in given["take"]:
        if not (folder / FILE).is_file():
            raise ConfigurationError(f"--take {folder}: there is no {FILE} in it. Give a folder of earlier results.")
    require_folder(given["out"])
    reproduce(Options(name, **given), partial(print, flush=True))


if __name__ == "__main__":
    sys.exit(main())
