"""`clipwise check`: test whether a model and a loss can be trained privately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from torch import nn

from clipwise import audit
from clipwise.audit.trial import run_of
from clipwise.cli.output import say
from clipwise.errors import ConfigurationError
from clipwise.recipes.target import call, running
from clipwise.validation.check import check as examine


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="path/to/file.py:function or package.module:function, which returns (model, loss, batch). "
            "loss(model, *batch), or loss(model, batch) for a mapping, returns one loss per example."
        ),
    ],
    neighbours: Annotated[
        bool, typer.Option(help="Also train a copy, and compare its releases with and without one example.")
    ] = False,
) -> None:
    """Test whether a model and a loss can be trained privately, and explain why if not.

    For example:

        clipwise check my_model.py:example

    where my_model.py has, for instance:

        def example():
            return Net(), lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"), (x, y)

    Use synthetic or public rows for the batch, because the output depends on them. The check runs your code with
    examples replaced, removed and reordered, and tests whether the loss or gradient of any other example changes. It
    can find a problem; it is not a proof.

    Exit code 0: accepted. 1: refused. 2: the check could not run.
    """
    model, loss, batch = _parts(call(target), target)
    with running(target):
        report = examine(model, loss, batch)
    say(str(report), style="" if report.ok else "red")
    if neighbours and report.ok:
        with running(target):
            compared = audit.neighbours(*run_of(model, loss, batch), records=(0, 1))
        say(str(compared), style="" if compared.ok else "red")
        raise typer.Exit(0 if compared.ok else 1)
    raise typer.Exit(0 if report.ok else 1)


def _parts(made: object, target: str) -> tuple[nn.Module, Callable[..., Any], Any]:
    if isinstance(made, tuple) and len(made) == 3:
        model, loss, batch = made
        if isinstance(model, nn.Module) and callable(loss) and isinstance(batch, (tuple, list, Mapping)):
            return model, loss, batch
    raise ConfigurationError(
        f"{target} must return (model, loss, batch): a torch.nn.Module, a function loss(model, *batch) and a "
        "tuple of the remaining arguments, such as (x, y), or a mapping that is the only argument."
    )
