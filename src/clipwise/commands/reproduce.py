"""`clipwise reproduce`: the experiments of a paper, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.commands.output import say
from clipwise.commands.places import require_folder, require_results
from clipwise.reproduce.paper import asked_for
from clipwise.reproduce.papers import PAPERS
from clipwise.reproduce.runner import Options
from clipwise.reproduce.runner import reproduce as run
from clipwise.reproduce.store import FILE


def reproduce(
    paper: Annotated[str, typer.Argument(help=f"Which paper: {', '.join(PAPERS)}.")],
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="By name, such as 4, B (appendix B) or equal-epsilon; may be repeated. All if left out."
        ),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="By name, such as 5; may be repeated. All if left out.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of data sets; if left out, CLIPWISE_DATA names it.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each row, in place of what a figure or table has.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Shorten every run to so many epochs.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rows on small digits: shows that it works, not how well.")
    ] = False,
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this time and keep what is finished.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    take: Annotated[
        list[Path] | None, typer.Option(help="Take over the runs of another folder of results.")
    ] = None,
    only: Annotated[str, typer.Option(help="Rows with this text in their name, and no others.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the results; runs/PAPER if left out. What is there is not run again."
        ),
    ] = None,
) -> None:
    """Run the experiments of a paper again, with the true epsilon of every run.

    For example, what figure 4 of the batch-clipping paper shows, on a GPU:

        clipwise reproduce batch-clipping --figure 4 --data DIR --device cuda --workers 8

    Table 5 of the normalization paper:

        clipwise reproduce normalization --table 5 --data DIR --device cuda --workers 12

    Or, without any data set, to see that it works:

        clipwise reproduce batch-clipping --quick

    The folder gets results.json and results.md. A command that was stopped goes on there.
    """
    require_results(take or (), FILE)
    require_folder(out or Path("runs") / paper)
    run(
        Options(
            paper=paper,
            out=out or Path("runs") / paper,
            figures=asked_for(figure or (), table or ()),
            data=data,
            device=device,
            seeds=seeds,
            epochs=epochs,
            quick=quick,
            budget_seconds=budget_seconds,
            workers=workers,
            retry=retry,
            take=tuple(take or ()),
            only=only,
        ),
        say,
    )
