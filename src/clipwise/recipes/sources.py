"""The kinds of data: which source reads a target of `clipwise train`, and which encoder a run's folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices
from clipwise.recipes.digits import EMBEDDED, DigitsEncoder, DigitsSource
from clipwise.recipes.functions import FunctionEncoder, FunctionSource
from clipwise.recipes.kind import Encoder, Source

_ENCODERS: Mapping[str, type[Encoder]] = {"digits": DigitsEncoder, "function": FunctionEncoder}


def open_source(choices: Choices) -> Source:
    """Open the data that the user named. Looks at the content of no record."""
    kind = kind_of(choices)
    if kind == "digits":
        return DigitsSource(train=True)
    if kind == "function":
        return FunctionSource(choices.path)
    raise ConfigurationError(f"TARGET {choices.path!r} is not known.")


def kind_of(choices: Choices) -> str:
    """The kind of the data: as chosen, or from the target."""
    if choices.data_kind is not None:
        return choices.data_kind
    if choices.path == EMBEDDED and not Path(choices.path).exists():
        return "digits"
    if ":" in choices.path and not Path(choices.path).exists():
        return "function"
    return "table"


def public_test(choices: Choices, encoder: Encoder) -> Source | None:
    """The public test rows, if there are any."""
    if choices.public_test is None:
        return None
    return encoder.open(Path(choices.public_test))


def encoder_from(data: Mapping[str, Any]) -> Encoder:
    """The encoder of a run, from its config.toml."""
    if data.get("kind") not in _ENCODERS:
        raise ConfigurationError(f"[encoding] kind = {data.get('kind')!r} is not known: use the version that wrote it.")
    return _ENCODERS[data["kind"]].from_dict(data)
