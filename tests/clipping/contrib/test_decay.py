"""A bound that shrinks by a schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import PerExample, Quantile
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive
from clipwise.errors import CheckpointError, ConfigurationError
from clipwise.privacy import effective_multiplier
from tests.clipping.contrib.test_adaptive import known
from tests.clipping.policies import POLICIES, policy, public, small_model
from tests.runs import private_run, train
from tests.sites import site

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("factor", [0, 1.5, -0.5, math.nan, True, "0.9", None], ids=repr)
def test_a_factor_lies_between_0_and_1(factor: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"NormDecay: factor must be .* greater than 0 and at most 1"):
        NormDecay(1.0, factor)


@pytest.mark.parametrize("every", [0, None, "step", 1.0], ids=repr)
def test_it_happens_every_epoch_or_so_many_steps(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="NormDecay: every="):
        NormDecay(1.0, 0.9, every)


@pytest.mark.parametrize("norm", [0, -1.0, math.inf, "1", None, {"0": 0.0}], ids=repr)
def test_it_begins_at_a_positive_number(norm: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_norm must be a finite number that is at least"):
        PerExample(NormDecay(norm, 0.9))


@pytest.mark.parametrize("norm", [Quantile(), NormDecay(1.0, 0.5)], ids=["quantile", "decay"])
def test_a_bound_that_moves_already_is_refused(norm: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_norm must be a finite number"):
        PerExample(NormDecay(norm, 0.9))


@QUICK
@given(st.floats(0.01, 1), st.integers(1, 5), st.integers(1, 30), st.sampled_from(["all", "layer", "tensor"]))
def test_the_bound_is_that_of_the_formula(factor: float, every: int, steps: int, parts: str) -> None:
    clipper = PerExample(NormDecay(3.0, factor, every), parts).attach(site(small_model()))
    start = [b.sensitivity for b in PerExample(3.0, parts).attach(site(small_model())).bounds]
    assert [b.sensitivity for b in clipper.bounds] == start
    for t in range(1, steps + 1):
        assert clipper.learn({}) is (t % every == 0)
        share = max(factor ** (t // every), 1e-6)
        assert [b.sensitivity for b in clipper.bounds] == pytest.approx([C * share for C in start])


def test_one_number_for_each_part() -> None:
    clipper = PerExample(NormDecay({"0": 1.0, "2": 2.0, "4": 4.0}, 0.5, every=1), "layer").attach(site(small_model()))
    clipper.learn({})
    assert [b.sensitivity for b in clipper.bounds] == [0.5, 1.0, 2.0]


def test_an_epoch_is_that_of_the_scheme() -> None:
    clipper = PerExample(NormDecay(1.0, 0.5)).attach(site(small_model()))  # 10 of 1000
    assert [t for t in range(1, 301) if clipper.learn({})] == [100, 200, 300]


@pytest.mark.parametrize(("every", "inner", "lasts"), [(5, 3, 3), (2, 3, 2), (4, None, 4)])
def test_bounds_last_until_the_first_of_both_changes(every: int, inner: int | None, lasts: int) -> None:
    on = small_model()
    parts = Adaptive(public(), every=inner)
    assert PerExample(NormDecay(1.0, 0.5, every=every), parts).attach(site(on)).lasts == lasts


def test_a_long_run_ends_at_a_millionth() -> None:
    clipper = PerExample(NormDecay(2.0, 0.01, every=1)).attach(site(small_model()))
    for _ in range(2000):
        clipper.learn({})
    assert clipper.bounds[0].sensitivity == 2e-6


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("released")])
def test_with_a_policy_everything_shrinks_together(name: str) -> None:
    on = small_model()
    plain, decaying = (
        PerExample(norm, policy(name, public())).attach(site(on)) for norm in (0.6, NormDecay(0.6, 0.5, every=1))
    )
    assert plain.bounds == decaying.bounds and plain.divisor == decaying.divisor
    assert plain.draws == decaying.draws
    for share in (0.5, 0.25):
        with torch.no_grad():
            on[4].weight *= 1.3
        plain.learn({})
        assert decaying.learn({})
        for a, b in zip(plain.bounds, decaying.bounds, strict=True):
            assert b.sensitivity == pytest.approx(share * a.sensitivity)
            assert (a.name, a.parameters, a.scales, a.alone) == (b.name, b.parameters, b.scales, b.alone)


@pytest.mark.parametrize("parts", ["all", "layer", Adaptive(known(), every=2)], ids=["all", "layer", "adaptive"])
def test_the_event_stays_and_the_noise_follows(parts: Any) -> None:
    on, private = private_run(clipping=PerExample(NormDecay(1.0, 0.5), parts), noise_multiplier=0.9)
    stds = []
    for _ in range(3):
        stds.append(sum(p.noise_std for p in private.parts()))
        assert private.noise_multiplier == 0.9 <= effective_multiplier(private.parts()) <= 0.9 * (1 + 1e-9)
        train(on, private, 5)  # an epoch
    if isinstance(parts, str):
        assert stds == pytest.approx([stds[0], stds[0] / 2, stds[0] / 4])
    assert len(private._context.ledger.history()) == 1
    assert private.state_dict()["configuration"]["strategy"]["decay"] == {"releases": 15}


def test_a_state_goes_back_to_where_it_was() -> None:
    strategy = PerExample(NormDecay(1.0, 0.5, every=2))
    one, other = (strategy.attach(site(small_model())) for _ in range(2))
    for _ in range(5):
        one.learn({})
    assert other.load_state_dict(one.state_dict()) and other.bounds == one.bounds
    assert other.learn({}) and one.learn({}) and other.bounds == one.bounds
    for damage in ({}, {"decay": {}}, {"decay": {"releases": -1}}, {"decay": {"releases": "5"}}):
        with pytest.raises(CheckpointError, match="damaged"):
            other.load_state_dict(damage)
