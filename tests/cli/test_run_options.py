"""Errors of the command line name options instead of arguments."""

from __future__ import annotations

import pytest

from clipwise.cli.run_options import in_options, naming_options
from clipwise.errors import ConfigurationError


@pytest.mark.parametrize(
    ("message", "rewritten"),
    [
        ("sampling='full' takes all: give no batch_size.", "--sampling full takes all: give no --batch-size."),
        ("max_batch_size=3 is below 4.", "--max-batch-size 3 is below 4."),
        ("microbatches=3 must divide batch_size=10: so.", "--microbatches 3 must divide --batch-size 10: so."),
        ("steps must be positive, not 0.", "--steps must be positive, not 0."),
        ("epsilon=0.1 at delta=1e-05 is small.", "--epsilon 0.1 at --delta 1e-05 is small."),
        ("Give fewer steps; the delta is too large.", "Give fewer steps; the delta is too large."),
        ("Give --batch-size.", "Give --batch-size."),
    ],
)
def test_arguments_become_options(message: str, rewritten: str) -> None:
    assert in_options(message) == rewritten == in_options(rewritten)


def test_an_error_keeps_its_type() -> None:
    with pytest.raises(ConfigurationError, match=r"^--sample-rate 2 is too large$"), naming_options():
        raise ConfigurationError("sample_rate=2 is too large")
