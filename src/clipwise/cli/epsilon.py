"""`clipwise epsilon`: the privacy cost of a run, planned or recorded in a ledger."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from clipwise import accounting
from clipwise.accounting.repeat import LARGEST_MEAN
from clipwise.cli.options import takes_options
from clipwise.cli.output import draw, in_words, require_picture, rounded_up, say, stdout
from clipwise.cli.run_options import Ledgers, RunOptions, SecondOpinion, releases_of, table_of
from clipwise.errors import ConfigurationError
from clipwise.ledger import multi_run
from clipwise.report import plots
from clipwise.validation.arguments import number


class Picture(str, Enum):
    """What --plot draws."""

    STEPS = "steps"
    PROFILE = "profile"


@takes_options
def epsilon(
    options: RunOptions,
    ledger: Ledgers = None,
    at_epsilon: Annotated[float | None, typer.Option(help="Also print the delta at this epsilon.")] = None,
    repetitions: Annotated[
        float | None,
        typer.Option(help="The mean of a random (geometric) number of runs, of which only the best is released."),
    ] = None,
    second_opinion: SecondOpinion = False,
    plot: Annotated[Path | None, typer.Option(help="Plot to this file, which ends in .png or .svg.")] = None,
    plot_kind: Annotated[
        Picture | None, typer.Option(help="Plot epsilon over the steps (the default), or delta over epsilon.")
    ] = None,
) -> None:
    """The privacy cost of a training run: the smallest epsilon at the given delta.

    For a planned run:

        clipwise epsilon --noise-multiplier 1.1 --batch-size 256 --dataset-size 60000 --epochs 60

    For a recorded run (the ledger is only read and may be in use), or for several runs on the same data, which
    compose:

        clipwise epsilon --ledger runs/demo/epsilon-8/ledger --ledger runs/demo/epsilon-3/ledger

    Smaller is more private: below 1 is strong, 1 to 10 is usual for trained models, and far above 10 the guarantee
    is weak. All figures are upper bounds except the one in brackets. PLD is tight, and is the figure to report for a
    single run. RDP is looser and cheap, so progress bars show it. For several runs report the Renyi filter: it also
    holds if a run was configured after releases of another run were seen.
    """
    require_picture(plot)
    if plot is None and plot_kind is not None:
        raise ConfigurationError("--plot-kind needs --plot, the file to write.")
    if repetitions is not None:
        number("--repetitions", repetitions, above=1, below=LARGEST_MEAN)
    if at_epsilon is not None:
        number("--at-epsilon", at_epsilon, least=0)
    delta = options.delta
    about = releases_of(ledger, options)
    if plot_kind is Picture.PROFILE:  # plots first, so that an invalid file is refused at once
        draw(plot, lambda file: plots.delta_profile(about.history, file))
    else:
        draw(plot, lambda file: plots.epsilon_over_steps(about.history, delta, file))
    about.describe()
    stdout().print(table_of(about.history, delta, second_opinion, about.plan))
    about.explain_runs()
    for run in about.runs if len(about.runs) > 1 else ():  # beside the total
        alone = accounting.epsilon_of(run.history, delta)
        say(f"{run.path} alone: epsilon {rounded_up(alone)} (PLD)")
    if at_epsilon is not None:
        found = accounting.delta_of(about.history, at_epsilon)
        assumption = f", {about.assumption}" if about.assumption else ""
        say(f"At epsilon {at_epsilon:g} delta is {rounded_up(found)} (PLD{assumption}).")
    cost = multi_run.epsilon_of(about.history, delta, multi_run.accountant_of(about.history), about.plan)
    curve = None if about.is_shared else accounting.tradeoff_of(about.history)
    if not about.is_seeded:
        say(in_words(cost, delta, about.event.adjacency, about.event.unit, curve))
    if repetitions is not None:
        whole = accounting.search(about.history, mean=repetitions, delta=delta)
        say(
            f"The whole search, {repetitions:g} such runs on average of which only the best is released: epsilon "
            f"{rounded_up(whole)} (RDP). It holds if the number of runs is drawn by "
            f"accounting.Repetitions({repetitions:g}).draw() and each run draws its hyper-parameters at random."
        )
