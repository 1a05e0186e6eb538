"""`clipwise bench`: what private training costs, against the paper and against a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.bench import runner
from clipwise.bench.options import SUITES, Options
from clipwise.commands.output import say
from clipwise.commands.places import require_folder


def bench(
    out: Annotated[
        Path, typer.Option(help="The folder of the results. What is measured there is not measured again.")
    ] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    suite: Annotated[
        str,
        typer.Option(
            help="paper: the figures of the paper. peers: the table of bars. scaling: how the cost grows."
        ),
    ] = SUITES[0],
    row: Annotated[
        list[str] | None,
        typer.Option(help="A row of the table, by name; may be given several times. All if left out."),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(help="5, 6, 7, 8, 9, largest or more; may be given several times. All if left out."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="non-private, bookkeeping, reweight, loop, ...; several times. All if left out."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few small settings, few rounds: shows that it works.")
    ] = False,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Stop after this time and keep what is measured.")
    ] = None,
    cell_seconds: Annotated[float, typer.Option(help="About the most for one measurement.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of weights, data and the order of batches.")] = 0,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what failed.")] = False,
    render: Annotated[
        Path | None, typer.Option(help="Write tables and plots of this folder, and measure nothing.")
    ] = None,
) -> None:
    """Measure time and memory of private training next to non-private training.

    For example, what figure 5 of the fast per-example clipping paper shows, on this machine:

        clipwise bench --figure 5 --out runs/figure-5

    Or the table of what a private step costs, and what it may cost at most:

        clipwise bench --suite peers --out runs/peers

    Each way to clip is timed in turns with non-private training. What cannot run is shown with its reason.
    The folder gets results.json, results.md and, for figures, plots; a run that was stopped goes on there.
    """
    if render is not None:
        runner.render(render, say)
        return
    require_folder(out)
    runner.bench(
        Options(
            out=out,
            device=device,
            suite=suite,
            figures=figure or [],
            rows=row or [],
            methods=method or [],
            quick=quick,
            budget_seconds=budget_seconds,
            cell_seconds=cell_seconds,
            seed=seed,
            retry=retry,
        ),
        say,
    )
