"""A search over runs with few outputs has a closed-form distribution: no bound may be below its divergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise import accounting
from clipwise.accounting import rdp
from clipwise.accounting.repeat import Repetitions
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit

SHAPES = [-0.7, 0.0, 1e-9, 0.5, 1.0, 4.0, math.inf]
RUN: dict[str, Any] = {"noise_multiplier": 1.1, "sample_rate": 256 / 60000, "steps": 14062, "delta": 1e-5}


def generating_function(repetitions: Repetitions, x: np.ndarray) -> np.ndarray:
    """E[x^K], from the definition of the distributions."""
    shape, gamma = repetitions.shape, 0.0 if repetitions.is_poisson else math.exp(repetitions.log_gamma)
    if repetitions.is_poisson:
        return np.exp(repetitions.mean * (x - 1))
    if shape == 0:
        return np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return np.expm1(-shape * np.log1p(-(1 - gamma) * x)) / math.expm1(-shape * math.log(gamma))


def best_of(repetitions: Repetitions, run: np.ndarray) -> np.ndarray:
    """The distribution of the best output, the last being the best; "nothing" comes first, if possible."""
    below = np.concatenate([[0.0], np.cumsum(run)])
    below[-1] = 1.0
    values = generating_function(repetitions, below)
    return np.concatenate([values[:1], np.diff(values)])


def divergences(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    seen = (p > 0) & (q > 0)
    log_p, log_q = np.log(p[seen]), np.log(q[seen])
    orders = rdp.ORDERS[:, None]
    return np.logaddexp.reduce(orders * log_p + (1 - orders) * log_q, axis=1) / (rdp.ORDERS - 1)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    return np.maximum(p - np.exp(epsilons)[:, None] * q, 0).sum(axis=1)


outputs = st.lists(st.floats(0.02, 1), min_size=3, max_size=8)


@settings(max_examples=80, deadline=None)
@given(outputs, st.data(), st.sampled_from(SHAPES), st.floats(1.05, 300))
def test_no_search_over_a_small_mechanism_costs_more(
    weights: list[float], data: st.DataObject, shape: float, mean: float
) -> None:
    factors = data.draw(st.lists(st.floats(0.4, 2.5), min_size=len(weights), max_size=len(weights)))
    p = np.array(weights) / sum(weights)
    q = p * factors / (p * factors).sum()
    repetitions = Repetitions(mean, shape)
    of_run = np.maximum(divergences(p, q), divergences(q, p))

    def deltas(epsilons: np.ndarray) -> np.ndarray:
        return np.maximum(hockey_stick(p, q, epsilons), hockey_stick(q, p, epsilons))

    bound = repetitions.divergences(of_run, deltas)
    best_p, best_q = best_of(repetitions, p), best_of(repetitions, q)
    assert best_p.sum() == pytest.approx(1, abs=1e-9)
    exact = np.maximum(divergences(best_p, best_q), divergences(best_q, best_p))
    assert (exact <= bound + 1e-9).all()


def test_a_bound_below_the_theorem_would_be_found() -> None:
    """The same search without the cost of repetition: the test above detects it."""
    p = np.array([0.5, 0.3, 0.2])
    q = np.array([0.6, 0.3, 0.1])
    for shape in (0.0, 1.0, math.inf):
        repetitions = Repetitions(10.0, shape)
        exact = divergences(best_of(repetitions, p), best_of(repetitions, q))
        assert (exact > divergences(p, q)).any()


@pytest.mark.parametrize("shape", [-0.9, -0.5, 0.0, 1e-13, 1e-5, 0.3, 1.0, 7.0, 50.0])
@pytest.mark.parametrize("mean", [1.0001, 1.5, 10.0, 1e4, 9e8])
def test_gamma_gives_the_mean(shape: float, mean: float) -> None:
    x = -Repetitions(mean, shape).log_gamma
    assert x > 0
    by_hand = math.expm1(x) / x if abs(shape) < 1e-9 else shape * math.expm1(x) / -math.expm1(-shape * x)
    assert by_hand == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_have_the_stated_distribution(shape: float) -> None:
    repetitions, count = Repetitions(4.0, shape), 20_000
    random = np.random.default_rng(5)
    drawn = np.array([repetitions.draw(random) for _ in range(count)])
    assert drawn.min() >= (0 if repetitions.is_poisson else 1)
    # Compared with the generating function; the standard error is that of x^K.
    for x in (0.2, 0.5, 0.9, 0.99):
        values = x**drawn
        expected = float(generating_function(repetitions, np.array([x]))[0])
        assert abs(values.mean() - expected) < 4.5 * values.std() / math.sqrt(count)


def test_extreme_distributions_have_a_bound() -> None:
    of_run = rdp.ORDERS / 8
    for mean, shape in [(1 + 1e-12, 1.0), (9e8, -0.9999), (9e8, 1e6), (9e8, math.inf), (1e-9, math.inf)]:
        found = Repetitions(mean, shape).divergences(of_run, lambda epsilons: np.full_like(epsilons, 1e-3))
        assert np.isfinite(found).all() and (found >= 0).all()
    assert Repetitions(1e6, 50.0).draw(np.random.default_rng(0)) > 10**5  # its first masses underflow


def test_known_distributions() -> None:
    geometric = Repetitions(5.0, 1.0)
    assert math.exp(geometric.log_gamma) == pytest.approx(1 / 5)
    random = np.random.default_rng(1)
    drawn = [geometric.draw(random) for _ in range(20_000)]
    counts = np.bincount(np.minimum(drawn, 20), minlength=21)[1:]
    shares = stats.geom(1 / 5).pmf(np.arange(1, 21))
    shares[-1] = stats.geom(1 / 5).sf(19)
    assert stats.chisquare(counts, 20_000 * shares).pvalue > 1e-3


def test_a_search_costs_more_than_a_run_and_less_than_all_its_runs() -> None:
    one = accounting.epsilon(**RUN, accountant="rdp")
    for shape in (0.0, 1.0):
        costs = [accounting.search(**RUN, mean=mean, shape=shape) for mean in (1.01, 2.0, 10.0, 100.0)]
        assert one < costs[0] < costs[1] < costs[2] < costs[3]
        assert costs[2] < accounting.epsilon(**{**RUN, "steps": 10 * RUN["steps"]})
    assert one < accounting.search(**RUN, mean=10.0, shape=math.inf) < 3 * one


def test_it_agrees_with_dp_accounting() -> None:
    import dp_accounting as dp
    from dp_accounting import dp_event

    run = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(RUN["sample_rate"], dp.GaussianDpEvent(1.1)), RUN["steps"])
    for shape in (0.0, 1.0, 3.0):
        accountant = dp.rdp.RdpAccountant(rdp.ORDERS)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(run, mean=20.0, shape=shape))
        found = accounting.search(**RUN, mean=20.0, shape=shape)
        assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_histories_arguments_and_truncated_batches() -> None:
    event = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 256 / 60000)
    history = [Entry(event, 14062)]
    assert accounting.search(history, mean=3.0, delta=1e-5) == accounting.search(**RUN, mean=3.0)
    cut = {**RUN, "sampling": "truncated-poisson", "dataset_size": 60000}
    assert accounting.search(**cut, mean=3.0) == pytest.approx(accounting.search(**RUN, mean=3.0), rel=1e-5)
    # Truncation in any of the runs is three times as likely on average.
    tight = {**cut, "max_batch_size": 380}
    assert accounting.search(**tight, mean=3.0) > accounting.search(**cut, mean=3.0)
    assert accounting.search([], mean=3.0, delta=1e-5) == 0
    assert accounting.search(**{**RUN, "noise_multiplier": 0}, mean=3.0) == math.inf
    with pytest.raises(ConfigurationError, match="history"):
        accounting.search(history, mean=3.0, **RUN)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mean": 1.0}, "mean"),
        ({"mean": math.inf}, "mean"),
        ({"mean": None}, "mean"),
        ({"mean": 0.0, "shape": math.inf}, "mean"),
        ({"mean": 2.0, "shape": -1.0}, "shape"),
        ({"mean": 2.0, "shape": math.nan}, "shape"),
        ({"mean": 2.0, "shape": "geometric"}, "shape"),
        ({"mean": 2.0, "shape": None}, "shape"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}(=| must be)"):
        accounting.search(**RUN, **arguments)
