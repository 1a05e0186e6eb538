"""A verdict needs seeds, whole runs and a search."""

import pytest

from experiments.harness.verdicts import lacking


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ((3, 6, 3), ""),
        ((1, 6, 3), "one seed"),
        ((2, 6, 3), "2 seeds"),
        ((3, 1, 1), "one learning rate"),
        ((3, 5, 3), "5 trials in 3 dimensions"),
        ((3, 6, 3, 50, 50), ""),
        ((1, 1, 2, 2, 50), "one seed, 2 of 50 epochs, one learning rate"),
    ],
)
def test_what_is_missing(arguments, missing):
    assert lacking(*arguments) == missing
