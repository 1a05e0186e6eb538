"""Refusals in the words of the command line: options, where the library names its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from clipwise.errors import ConfigurationError

# Names that are no words of a sentence, and names that are: those stand for an argument only beside a value.
_NAMES = "sample_rate|max_batch_size|batch_size|dataset_size|mini_sets|noise_multiplier"
_WORDS = "sampling|adjacency|unit|steps|epochs|delta|epsilon"
_WITH_VALUE = re.compile(rf"\b({_NAMES}|{_WORDS})=('[^']*'|[^\s:,;]*[^\s:,;.])")
_ALONE = re.compile(rf"\b(?<!--)({_NAMES})\b|^({_WORDS})(?= must )")


def in_options(message: str) -> str:
    """The message with `--batch-size` for batch_size and `--sampling full` for sampling='full'."""
    message = _WITH_VALUE.sub(lambda found: f"{_option(found[1])} {found[2].strip(chr(39))}", message)
    return _ALONE.sub(lambda found: _option(found[0]), message)


@contextmanager
def naming_options() -> Iterator[None]:
    """What the library refuses here came from options, and is told by their names."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(in_options(str(error))) from error


def _option(argument: str) -> str:
    return "--" + argument.replace("_", "-")
