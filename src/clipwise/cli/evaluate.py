"""`clipwise evaluate`: the accuracy of a trained model on further records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.options import AsJson, FileEncoding, RunPath, epsilon_of
from clipwise.cli.output import say
from clipwise.errors import ConfigurationError
from clipwise.recipes.evaluate import exact_figures, groups_of, noised_figures, scores
from clipwise.recipes.finish import rounded, trained_model
from clipwise.recipes.planning import default_delta, evaluation_event
from clipwise.recipes.predict import open_run
from clipwise.recipes.sources import open_further


def evaluate(
    run: RunPath,
    data: Annotated[Path, typer.Argument(help="Records like those that the run was trained on, with the target.")],
    public: Annotated[bool, typer.Option("--public", help="You declare the records public: no noise.")] = False,
    epsilon: Annotated[str | None, typer.Option(help="Private records: the budget of the noised figure.")] = None,
    delta: Annotated[float | None, typer.Option(help="By default well below one over the number of records.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="With --epsilon: a new ledger file for the release.")] = None,
    groups: Annotated[str | None, typer.Option(help="A column: also the accuracy for each of its categories.")] = None,
    encoding: FileEncoding = None,
    as_json: AsJson = False,
) -> None:
    """The accuracy of a run's model on further records.

    For example:

        clipwise evaluate runs/data-epsilon-3 test.csv --public

        clipwise evaluate runs/data-epsilon-3 new.csv --epsilon 1 --ledger new.ledger

    The figure is a release. On private records it is noised, and the ledger holds its cost. If records were also used
    in the run, `clipwise epsilon --ledger RUN/ledger --ledger new.ledger` gives the cost of both together.
    """
    if public == (epsilon is not None):
        raise ConfigurationError(
            "Give --public if the records are public, or --epsilon and --ledger if they are private and the figure "
            "must be noised."
        )
    if (ledger is None) != (epsilon is None):
        raise ConfigurationError("--epsilon and --ledger belong together: the ledger records what the figure costs.")
    folder, encoder, name = open_run(run)
    source = open_further(encoder, data, encoding)
    model = trained_model(encoder, name, folder)
    score_N = scores(model, encoder, source)
    of_rows = groups_of(source, encoder, groups, None)
    budget = epsilon_of(epsilon)
    if budget is None or ledger is None:
        figures = exact_figures(encoder, score_N, of_rows)
    else:
        if math.isinf(budget):
            raise ConfigurationError("--epsilon none is not possible: give --public if the records are public.")
        if ledger.exists():
            raise ConfigurationError(f"--ledger {ledger} exists: give a new file.")
        chosen = default_delta(len(source)) if delta is None else delta
        event = evaluation_event(budget, chosen)
        figures = noised_figures(
            encoder, score_N, event, ledger, epsilon=budget, delta=chosen, groups=of_rows, rows="private"
        )
    for figure in figures:
        say(json.dumps(figure.to_dict()) if as_json else rounded(figure.to_dict()))
    if ledger is not None and not as_json:
        say(f"It cost epsilon {budget:g} at delta {chosen:g} (zero-out of one record), charged to {ledger}.")
