"""The kinds of data: which source reads a path, and which encoder a run's folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices
from clipwise.recipes.digits import EMBEDDED, DigitsEncoder, DigitsSource
from clipwise.recipes.kind import Encoder, Source


def open_source(choices: Choices) -> Source:
    """Open the data that the user named. Looks at no record."""
    if choices.path == EMBEDDED:
        return DigitsSource(train=True)
    raise ConfigurationError(f"TARGET {choices.path!r} is not known.")


def public_test(choices: Choices, encoder: Encoder) -> Source | None:
    """The public test rows, if there are any."""
    if choices.public_test is None:
        return None
    return encoder.open(Path(choices.public_test))


def encoder_from(data: Mapping[str, Any]) -> Encoder:
    """The encoder of a run, from its config.toml."""
    return _ENCODERS[data["kind"]].from_dict(data)


_ENCODERS: dict[str, type[Encoder]] = {"digits": DigitsEncoder}
