"""Groups of layers by typical norm: where they are cut, and their bounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import PerExample
from clipwise.clipping.contrib.policies import ByNorm, best_cuts
from clipwise.clipping.contrib.typical import mean_norms
from clipwise.errors import ConfigurationError
from tests.clipping.contrib.test_adaptive import LAYERS
from tests.clipping.policies import public, small_model
from tests.gradients.cases import trainable
from tests.sites import site

QUICK = settings(max_examples=100, deadline=None, derandomize=True)


def deviations(values: list[float], cuts: list[int]) -> float:
    runs = [torch.tensor(values[a:b], dtype=torch.float64) for a, b in itertools.pairwise(cuts)]
    return sum(float((run - run.mean()).square().sum()) for run in runs)


@QUICK
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(1, 5))
def test_no_other_cuts_are_better(values: list[float], runs: int) -> None:
    values, n = sorted(values), len(values)
    found = best_cuts(values, runs)
    assert found[0] == 0 and found[-1] == n and len(found) == min(runs, n) + 1
    assert all(a < b for a, b in itertools.pairwise(found))
    others = ([0, *inner, n] for inner in itertools.combinations(range(1, n), min(runs, n) - 1))
    assert deviations(values, found) <= min(deviations(values, cuts) for cuts in others) + 1e-9


def test_clear_groups_are_found() -> None:
    assert best_cuts([0.0, 0.1, 3.0, 3.1, 3.2, 7.0], 3) == [0, 2, 5, 6]


def test_many_tensors_take_no_time() -> None:
    assert len(best_cuts(torch.randn(200).sort().values.tolist(), 4)) == 5


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_the_bounds_are_those_of_the_definition(groups: int) -> None:
    on = small_model()
    e = mean_norms(public(), on, trainable(on), LAYERS, "example", None)
    bounds = PerExample(1.7, ByNorm(public(), groups=groups)).attach(site(on)).bounds
    assert [b.name for b in bounds] == [f"group {k}" for k in range(min(groups, 3))]
    assert math.hypot(*(b.sensitivity for b in bounds)) == pytest.approx(1.7)  # max_norm is the total
    whole = math.hypot(*e.values())
    seen: list[str] = []
    for b in bounds:
        mine = [h for h in LAYERS if f"{h}.weight" in b.parameters]
        assert sorted(b.parameters) == sorted(n for h in mine for n in LAYERS[h])  # a layer stays whole
        assert b.sensitivity == pytest.approx(1.7 * math.hypot(*(e[h] for h in mine)) / whole)
        seen += sorted(mine, key=lambda h: e[h])
    assert seen == sorted(LAYERS, key=lambda h: e[h])  # the shortest first


def test_what_counts_is_by_how_much_norms_differ_as_factors() -> None:
    """10 and 30 are closer than 1 and 10."""
    clipper = PerExample(1.0, ByNorm(public(), groups=2)).attach(site(small_model()))
    assert clipper.load_state_dict({"releases": 0, "typical": {"0": 1.0, "2": 10.0, "4": 30.0}})
    assert [b.parameters for b in clipper.bounds] == [tuple(LAYERS["0"]), (*LAYERS["2"], *LAYERS["4"])]


def test_layers_are_grouped_again_every_period() -> None:
    on = small_model()
    once, again = (PerExample(1.0, ByNorm(public(), groups=2, every=e)).attach(site(on)) for e in (None, 1))
    before = once.bounds
    assert again.bounds == before and (once.lasts, again.lasts) == (math.inf, 1)
    with torch.no_grad():
        on[4].weight *= 100
    assert not once.learn({}) and once.bounds == before
    assert again.learn({})
    assert [b.parameters for b in again.bounds] != [b.parameters for b in before]
    assert once.load_state_dict(again.state_dict()) and once.bounds == again.bounds


@pytest.mark.parametrize("groups", [0, -2, 2.0, True, "layer"], ids=repr)
def test_a_number_of_groups_is_a_whole_number(groups: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ByNorm: groups .*whole number"):
        ByNorm(public(), groups=groups)
