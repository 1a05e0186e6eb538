from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.accounting.composition import Step, compose
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.privacy import Adjacency, Amplification, Entry, Event, Sampling, Unit

Make = Callable[..., Entry]


def test_all_unamplified_releases_are_one_gaussian(entry: Make) -> None:
    history = [entry("full", 1.0, 2.0, 8), entry("shuffled", 0.1, 1.0, 25, period=10)]
    assert compose(history).mu == pytest.approx(math.sqrt(8 / 4 + 3))  # 25 steps of 10 are 3 passes
    assert compose(history).steps == ()


def test_an_interrupted_epoch_counts_in_full_each_time(entry: Make) -> None:
    epoch = entry("shuffled", 0.1, 1.0, 4, period=10)
    assert compose([epoch, epoch]).mu == pytest.approx(math.sqrt(2))


def test_equal_steps_are_merged_and_order_does_not_matter(entry: Make) -> None:
    a, b = entry("poisson", 0.1, 1.0, 3), entry("poisson", 0.2, 1.0, 5)
    assert compose([a, b, a]).steps == (
        (Step(Amplification.POISSON, 0.1, 1.0), 6),
        (Step(Amplification.POISSON, 0.2, 1.0), 5),
    )
    assert compose([a, b]) == compose([b, a])


def test_a_partition_is_accounted_like_fixed_size_batches(entry: Make) -> None:
    assert compose([entry("partition", 0.1, 1.0, 3)]) == compose([entry("fixed-size", 0.1, 1.0, 3)])
    assert compose([entry("partition", 0.1, 1.0, 3)]) != compose([entry("poisson", 0.1, 1.0, 3)])


def test_rate_one_is_no_amplification(entry: Make) -> None:
    assert compose([entry("poisson", 1.0, 2.0, 4)]) == compose([entry("full", 1.0, 2.0, 4)])


def test_steps_beyond_double_precision_are_replaced_by_worse_ones(entry: Make) -> None:
    assert compose([entry("poisson", 1e-200, 1e9, 1)]).steps[0][0] == Step(Amplification.POISSON, 1e-12, 1e6)
    small, sure = compose([entry("poisson", 0.1, 1e-3, 4)]), compose([entry("full", 1.0, 1e-3, 4)])
    assert (small.mu, small.steps, small.unamplified_mu) == (sure.mu, sure.steps, sure.unamplified_mu)
    assert small.drawn == (((0.1, 1e-3), 4),)  # for the bound by participations
    assert compose([entry("poisson", 0.1, 1e-200, 4)]).mu == math.inf


def test_no_noise_and_an_empty_history(entry: Make) -> None:
    assert compose([entry("poisson", 0.1, 1.0, 4), entry("poisson", 0.1, 0.0, 1)]).mu == math.inf
    assert compose([entry("poisson", 0.1, 0.0, 0)]) == compose([])


@pytest.mark.parametrize("change", [{"adjacency": Adjacency.REPLACE_ONE}, {"unit": Unit.USER}])
def test_different_guarantees_do_not_compose(entry: Make, change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedEventError, match="mixes"):
        compose([entry("poisson", 0.1, 1.0, 1), entry("full", 1.0, 1.0, 1, **change)])


def test_an_unknown_scheme_is_refused(entry: Make) -> None:
    unknown = entry("poisson", 0.1, 1.0, 1)
    object.__setattr__(unknown.event, "sampling", "balls-and-bins")
    with pytest.raises(UnsupportedEventError, match="balls-and-bins"):
        compose([unknown])


@pytest.mark.parametrize("count", [-1, 1.5])
def test_a_count_is_a_whole_number(entry: Make, count: float) -> None:
    with pytest.raises(ConfigurationError, match="count"):
        compose([Entry(entry("poisson", 0.1, 1.0, 1).event, count)])  # type: ignore[arg-type]


def test_truncation_probabilities_add_up() -> None:
    event = Event(Sampling.TRUNCATED_POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.1, 1, 1e-9)
    assert compose([Entry(event, 300), Entry(event, 200)]).excess == pytest.approx(5e-7, rel=1e-15)
    assert compose([Entry(event, 10**12)]).excess == 1
    plain = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.1)
    assert compose([Entry(event, 3)]).steps == compose([Entry(plain, 3)]).steps


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 10**9)), min_size=1, max_size=20))
def test_mu_is_rounded_up(releases: list[tuple[float, int]]) -> None:
    entries = [Entry(Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, z, 1.0), count) for z, count in releases]
    exact = sum(Fraction(count) / Fraction(z) ** 2 for z, count in releases)
    found = compose(entries).mu
    assert Fraction(found) ** 2 >= exact
    assert found == pytest.approx(math.sqrt(exact), rel=1e-14)
