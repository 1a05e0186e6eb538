"""`clipwise demo`: compare training with and without privacy on real data, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from clipwise.cli.output import is_live, rounded_up, say, stdout
from clipwise.cli.progress import Display, duration
from clipwise.cli.train import follow, stopping
from clipwise.recipes.demo import DELTA, NOTE, RUNS, choices, one_thread
from clipwise.recipes.planning import plan_of
from clipwise.recipes.run_folder import RunFolder, fresh_folder
from clipwise.recipes.train import begin
from clipwise.report.statement import of_ledger


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs. If it exists, OUT-2, OUT-3, ... is used.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[int | None, typer.Option(help="Reproducible noise and batches: no guarantee is claimed.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of all three runs.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch each, to check the installation.")] = False,
) -> None:
    """Train on real digits without privacy, at epsilon 8 and at epsilon 3, and compare.

    For example, under another name and with twice the usual epochs:

        clipwise demo --out runs/longer --epochs 60

    Each run is `clipwise train digits` with another --epsilon. A small network trains on 1437 handwritten digits and is
    tested on 360 others. Epsilon bounds how much the result reveals about any single one of the 1437: smaller is more
    private. The table at the end shows the cost of privacy.

    Each run has a folder with its weights, metrics and report and, if it is private, its ledger and a checkpoint.
    Nothing is downloaded.
    """
    if quick and epochs is None:
        epochs = 1
    console = stdout()
    folder = fresh_folder(out)
    runs = []
    with one_thread():
        for name, epsilon in RUNS:
            run = RunFolder(folder / name)
            run.path.mkdir()
            plan = plan_of(choices(epsilon, epochs=epochs, seed=seed))
            display = Display(plan.choices.epsilon if plan.choices.is_private else None, quiet=not is_live(console))
            with stopping(display) as stop:
                follow(begin(plan, run, f"clipwise demo, run {name}"), display, stop)
            runs.append(run)
            if not is_live(console):
                say(f"{name}: {plan.steps} steps, test accuracy {_accuracy(run):.1%}", console=console)
    console.print(_table(runs))
    say(NOTE, console=console)
    say(f"\nThe report of the last run is {runs[-1].report}\nEverything is in {folder}", console=console)


def _table(runs: list[RunFolder]) -> Table:
    table = Table("run", title="What privacy costs", title_justify="left")
    for heading in ("test accuracy", f"epsilon (PLD)\nat delta {DELTA:g}", "time"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(run.path.name, f"{_accuracy(run):.1%}", _epsilon(run), duration(run.progress()[-1]["seconds"]))
    return table


def _accuracy(run: RunFolder) -> float:
    return float(run.released()[-1]["value"])


def _epsilon(run: RunFolder) -> str:
    if not run.ledger.exists():
        return "none"
    found = of_ledger(run.ledger)
    return rounded_up(found.spent.epsilon) + ("\n(seeded)" if found.seeded else "")
