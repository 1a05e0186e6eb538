"""`clipwise demo`: compare training with and without privacy on real data, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from clipwise.cli.output import rounded_up, say, stdout
from clipwise.recipes.demo import DELTA, NOTE, RECIPES, Moment, Recipe, Result, fresh_folder, run, shortened


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs. If it exists, OUT-2, OUT-3, ... is used.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[
        int | None, typer.Option(help="Make the demo reproducible. A run with a given seed claims no guarantee.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Train all three runs for this many epochs instead of their defaults.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch each: shows that it works, not how well.")] = False,
) -> None:
    """Train on real digits without privacy, at epsilon 8 and at epsilon 3, and compare.

    For example, under another name and with twice the usual epochs:

        clipwise demo --out runs/longer --epochs 60

    A small network trains on 1437 handwritten digits and is tested on 360 others. Epsilon bounds how much the
    result reveals about any single one of the 1437: smaller is more private. During a run you see a quick upper
    bound on the epsilon spent so far (RDP); the table at the end has the tight bound (PLD). It also shows the cost
    of privacy: accuracy, and time per step relative to training without it.

    Each run writes a folder with its weights and metrics and, if it is private, its ledger, a checkpoint and
    its privacy statement. Nothing is downloaded.
    """
    if quick and epochs is None:
        epochs = 1
    console = stdout()
    folder = fresh_folder(out)
    results = [
        _follow(shortened(recipe, epochs), folder / recipe.name.replace(" ", "-"), seed, console) for recipe in RECIPES
    ]
    console.print(_table(results))
    if results[-1].statement is not None:
        say(f"\n{results[-1].statement}\n", console=console)
    say(NOTE, console=console)
    say(f"\nEverything is in {folder}", console=console)


def _follow(recipe: Recipe, folder: Path, seed: int | None, console: Console) -> Result:
    """Trains one run with a live progress display, or prints one line at the end without a terminal."""
    if not console.is_terminal:
        result = run(recipe, folder, seed=seed, watch=lambda _: None)
        say(f"{recipe.name}: {result.steps} steps, test accuracy {result.accuracy:.1%}", console=console)
        return result
    columns = (TextColumn("{task.description:<15}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(recipe.name, total=None, figures="")

        def watch(moment: Moment) -> None:
            figures = f"step {moment.step} of {moment.steps}"
            if moment.accuracy is not None:
                figures += f"  test accuracy {moment.accuracy:.1%}"
            if moment.rdp_epsilon is not None:
                figures += f"  epsilon so far (RDP) {rounded_up(moment.rdp_epsilon, 3)}"
            progress.update(task, completed=moment.step, total=moment.steps, figures=figures)

        return run(recipe, folder, seed=seed, watch=watch)


def _table(results: list[Result]) -> Table:
    """The runs side by side; times are relative to the first run, which is not private."""
    table = Table("run", title="What privacy costs", title_justify="left")
    epsilon = f"epsilon (PLD)\nat delta {DELTA:g}"
    for heading in ("test accuracy", epsilon, "median time\nper step", "relative\ntime"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.accuracy:.1%}",
            _epsilon(result),
            f"{1000 * result.seconds_per_step:.1f} ms",
            f"{result.seconds_per_step / results[0].seconds_per_step:.2f}",
        )
    return table


def _epsilon(result: Result) -> str:
    if result.epsilon is None or result.statement is None:
        return "none"
    return rounded_up(result.epsilon) + ("\n(seeded)" if result.statement.seeded else "")
