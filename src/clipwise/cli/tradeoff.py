"""`clipwise tradeoff`: the best that an attacker can do against a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from clipwise.cli.options import AsJson, takes_options
from clipwise.cli.output import draw, require_picture, rounded_up, say, say_json, stdout
from clipwise.cli.run_options import Ledgers, RunOptions, SecondOpinion, releases_of, table_of
from clipwise.report import plots
from clipwise.report.risk import Risk
from clipwise.report.wording import neighbours, percent


@takes_options
def tradeoff(
    options: RunOptions,
    ledger: Ledgers = None,
    second_opinion: SecondOpinion = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the curve to this file: .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """The best that an attacker who knows all records but one can do.

    For a planned run, or for a recorded one:

        clipwise tradeoff --noise-multiplier 1.1 --batch-size 256 --dataset-size 60000 --epochs 60

        clipwise tradeoff --ledger runs/demo/epsilon-3/ledger --plot curve.png

    The attacker sees every release and decides whether the one record took part. A higher false-positive rate allows
    a higher detection rate; the trade-off curve bounds it. Every figure is an upper bound over all attacks. 1%
    detected at 1% false alarms is a random guess.
    """
    require_picture(plot)
    about = releases_of(ledger, options)
    draw(plot, lambda file: plots.tradeoff_curve(about.history, file))  # first, so that an invalid file is refused
    risk = Risk.of(about.history, sorted({options.delta, 1e-3, 1e-7}, reverse=True))
    event = about.event
    if as_json:
        content = {
            "format": 1,
            "steps": sum(entry.count for entry in about.history),
            "adjacency": str(event.adjacency),
            "unit": str(event.unit),
            "seeded": about.is_seeded,  # a seeded run claims no guarantee: these are the figures with fresh keys
            **risk.to_dict(),
            **({"assumption": about.assumption} if about.assumption else {}),
        }
        say_json(content)
    else:
        about.describe()
        say(f"The two data sets to distinguish: {neighbours(event.adjacency, event.unit)}.")
        stdout().print(_table(risk))
        stdout().print(table_of(about.history, options.delta, second_opinion, about.plan))
        about.explain_runs()
        say(_in_terms_of_mu(risk.mu))


def _in_terms_of_mu(mu: float) -> str:
    if math.isinf(mu):
        return "No mu describes it: an attack may succeed without any false positive."
    return (
        f"About as private as one Gaussian release with mu = {rounded_up(mu)}: its curve, lowered by 1e-5, is nowhere "
        "above this one. 0 is perfect privacy, 1 is moderate, and from 3 on the guarantee is weak."
    )


def _table(risk: Risk) -> Table:
    table = Table("an attacker", "at most", "a random guess")
    for rate, power in risk.power:
        table.add_row(f"detects, at {100 * rate:g}% false alarms", percent(power), f"{100 * rate:g}%")
    table.add_row("detects more often than falsely alarms by", percent(risk.advantage), "0%")
    table.add_row("guesses right, if both are equally likely", percent(risk.accuracy), "50%")
    for delta, epsilon in risk.epsilons:
        table.add_row(f"epsilon at delta {delta:g}", rounded_up(epsilon), "0")
    return table
