"""Trials: as many for every method, spread over its space."""

import pytest

from clipwise.tune.subject import Choice
from experiments.backprop_clipping.grid import EPSILONS, rows
from experiments.backprop_clipping.search import SEARCH, Row, effort_of, space
from experiments.backprop_clipping.trial import BACKPROP, DP_SGD, METHODS


@pytest.mark.parametrize("method", [*DP_SGD, *BACKPROP])
def test_few_points_fill_the_space(method: str) -> None:
    """Both optimizers, all rates and lengths, and of each constant values below and above the middle."""
    row = Row("mnist", method, 1.0)
    trials = SEARCH.spread(row, 6)
    assert len(set(trials)) == 6
    for name, dimension in space(row).items():
        if isinstance(dimension, Choice):
            assert {getattr(t, name) for t in trials} == set(dimension.values), name
        elif name != "pace":
            values = [getattr(t, name) for t in trials]
            assert min(values) < dimension.at(0.4) and max(values) > dimension.at(0.6), name


def test_second_trials_are_near_the_first() -> None:
    row = Row("mnist", "gradient-clip", 1.0)
    centre = SEARCH.spread(row, 6)[2]
    for trial in SEARCH.near(row, 2, 3):
        assert trial != centre
        # A quarter of the extent of [1e-3, 1] is a factor 10^0.75.
        assert 10**-0.76 <= trial.grad_norm / centre.grad_norm <= 10**0.76


def test_a_method_has_no_constant_of_another() -> None:
    assert "max_norm" not in space(Row("mnist", "gradient-clip", 1.0))
    assert "grad_norm" not in space(Row("mnist", "gradient-normalize", 1.0))
    assert "input_norm" not in space(Row("mnist", "dp-sgd-tanh", 1.0))


def test_all_methods_have_the_same_effort_and_names_of_their_own() -> None:
    for data in EPSILONS:
        effort = effort_of(rows("5", data)[0], False)
        keys = [
            t.key
            for row in rows("5", data)
            for t in (*SEARCH.spread(row, effort.spread), *SEARCH.near(row, 0, effort.near))
        ]
        assert len(set(keys)) == len(keys)
        assert all(row.method in METHODS for row in rows("5", data))
