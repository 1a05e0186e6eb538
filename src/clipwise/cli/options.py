"""Options of a command that are the fields of a dataclass, and values that several commands read in the same way."""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from clipwise.errors import ConfigurationError

RunPath = Annotated[Path, typer.Argument(help="The folder of a run.")]
FileEncoding = Annotated[
    str | None, typer.Option("--encoding", help="The encoding of text in files; by default that of the run.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a command, a dataclass, by one option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    kind = hints["options"]
    kinds = get_type_hints(kind, include_extras=True)
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name == "options":
            parameters += [
                inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
                for f in fields(kind)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    @wraps(command)
    def with_options(**given: Any) -> None:
        options = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        command(options=options, **given)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def labels_of(text: str | None) -> tuple[str, ...] | None:
    """The labels of --labels. A label with a comma is in double quotes, as in CSV."""
    return None if text is None else tuple(label.strip() for label in next(csv.reader([text], skipinitialspace=True)))


def epsilon_of(text: str | None) -> float | None:
    """The budget of --epsilon; infinity for none."""
    if text is None:
        return None
    if text.lower() == "none":
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"--epsilon {text} is not possible: give a positive number, or none.")
    return value
