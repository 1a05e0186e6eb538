"""Time and memory of private training beside non-private training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.options import SUITES, Options
from benchmarks.runner import bench, render
from clipwise.ledger.durable_files import require_folder
from experiments.harness.command import Command, dispatch, parser_of

PROGRAM = "python -m benchmarks"
# Each module has `main(arguments)` with its own options.
SCRIPTS = {
    "backprop": Command("benchmarks.backprop", "backpropagation clipping beside ordinary training"),
    "breakdown": Command("benchmarks.breakdown", "where the time of a row of peers goes, operation by operation"),
    "distributed": Command(
        "benchmarks.distributed", "private training over several processes beside ordinary training"
    ),
    "layouts": Command("benchmarks.layouts", "models in which operations move rows or write in place"),
    "lipschitz": Command("benchmarks.lipschitz", "weight clipping beside ordinary training with noise"),
    "lipschitz-noise": Command("benchmarks.lipschitz_noise", "how large the noise of weight clipping is"),
    "plain": Command("benchmarks.plain", "plain training without clipwise: a check on the baseline of peers"),
    "secure-noise": Command("benchmarks.secure_noise", "secure noise beside standard noise"),
    "start-up": Command("benchmarks.start_up", "the first steps of a run beside the later ones"),
    "step-calls": Command("benchmarks.step_calls", "files and calls between files of one eager step"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the suite `paper`; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given = [next(iter(SUITES)), *given]
    suites = {name: (line, partial(_suite, name)) for name, line in SUITES.items()}
    scripts = {name: (command.line, command.main) for name, command in SCRIPTS.items()}
    return dispatch(PROGRAM, f"{__doc__} Without a name: paper.", suites | scripts, given)


def _suite(name: str, arguments: Sequence[str]) -> None:
    parser = parser_of(f"{PROGRAM} {name}", SUITES[name])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--row", dest="rows", action="append", default=[], help="of the table, or an axis; may be repeated"
    )
    parser.add_argument("--figure", dest="figures", action="append", default=[], help="5 to 9, largest, more")
    parser.add_argument("--method", dest="methods", action="append", default=[], help="a column; all if left out")
    parser.add_argument("--quick", action="store_true", help="few small settings, few rounds")
    parser.add_argument("--budget-seconds", type=float, help="stop after this time; keep what is measured")
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="about the most for one measurement")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--render", type=Path, metavar="DIR", help="write tables and plots of DIR, no more")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the process instead of a wall clock")
    options = vars(parser.parse_args(arguments))
    folder, say = options.pop("render"), partial(print, flush=True)
    if folder is not None:
        render(folder, say)
    else:
        require_folder(options["out"])
        bench(Options(suite=name, **options), say)


if __name__ == "__main__":
    sys.exit(main())
