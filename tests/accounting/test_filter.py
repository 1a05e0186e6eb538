from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import Filter, accountants, gaussian, rdp
from clipwise.accounting.composition import compose
from clipwise.accounting.filter import best_order, order_for_budget
from clipwise.accounting.filter import epsilon_at as history_at
from clipwise.errors import BudgetExhausted, ConfigurationError, UnsupportedEventError
from clipwise.privacy import Adjacency, Entry

Make = Callable[..., Entry]
DELTA = 1e-5


def epsilon_at(order: float, history: list[Entry]) -> float:
    """The conversion at one order, computed independently."""
    divergence = rdp.divergences(compose(history))[list(rdp.ORDERS).index(order)]
    return float(divergence + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 8), st.lists(st.tuples(st.sampled_from([0.7, 1.0, 1.5, 3.0]), st.integers(1, 300)), max_size=40))
def test_no_schedule_exceeds_the_budget(entry: Make, epsilon: float, wishes: list[tuple[float, int]]) -> None:
    base = entry("poisson", 0.02, 1.0, 400)
    budget = Filter(epsilon, DELTA, plan=[base])
    made: list[Entry] = []
    for z, count in wishes:
        event = replace(base.event, noise_multiplier=z)
        if budget.allows(event, count):
            budget.charge(event, count)
            made.append(Entry(event, count))
        else:
            before = budget.history
            with pytest.raises(BudgetExhausted, match="do not make it"):
                budget.charge(event, count)
            assert budget.history == before
    assert compose(budget.history) == compose(made)
    if made:
        assert epsilon_at(budget.order, made) <= epsilon
        assert budget.spent == pytest.approx(max(0.0, epsilon_at(budget.order, made)), rel=1e-9)
        assert accountants.epsilon_of(made, DELTA) <= epsilon  # a fixed schedule costs no more than that


@pytest.mark.parametrize(("rate", "z", "steps"), [(0.01, 1.0, 700), (0.1, 4.0, 300), (1.0, 20.0, 50)])
def test_a_constant_plan_gets_its_steps(entry: Make, rate: float, z: float, steps: int) -> None:
    plan = [entry("poisson", rate, z, steps)]
    epsilon = accountants.epsilon_of(plan, DELTA, "rdp")
    budget = Filter(epsilon, DELTA, plan=plan)
    for _ in range(steps):
        budget.charge(plan[0].event)
    assert budget.spent == pytest.approx(epsilon, rel=1e-12)
    assert budget.history == plan
    assert not budget.allows(plan[0].event, 1 + steps // 100)


def test_a_cheaper_step_may_fit_where_another_does_not(entry: Make) -> None:
    loud, quiet = entry("full", 1.0, 1.0, 1).event, entry("full", 1.0, 30.0, 1).event
    budget = Filter(7.0, DELTA, plan=[Entry(loud, 1)])
    budget.charge(loud)
    assert not budget.allows(loud) and budget.allows(quiet)
    assert budget.spent <= 7.0


def test_a_shuffled_epoch_is_charged_once(entry: Make) -> None:
    event = entry("shuffled", 0.1, 2.0, 1, period=10).event
    budget = Filter(accountants.epsilon_of([Entry(event, 20)], DELTA, "rdp"), DELTA, plan=[Entry(event, 20)])
    for _ in range(20):
        budget.charge(event)
    assert not budget.allows(event)
    assert budget.allows(replace(event, noise_multiplier=1e3)) is False  # another z begins a new epoch


def test_an_interrupted_epoch_is_not_merged_with_the_next(entry: Make) -> None:
    """Four runs of two steps of an epoch of four: each begins a new pass."""
    event = entry("shuffled", 0.25, 2.0, 1, period=4).event
    whole, broken = (Filter(50.0, DELTA, order=4) for _ in range(2))
    for _ in range(4):
        for _ in range(2):
            whole.charge(event)
            broken.charge(event)
        broken.restart()
        broken.restart()  # no entry to close
    assert whole.history == [Entry(event, 8)] and broken.history == [Entry(event, 2)] * 4
    assert whole.spent == pytest.approx(epsilon_at(4, [Entry(event, 8)]))  # two passes
    assert broken.spent == pytest.approx(epsilon_at(4, [Entry(event, 16)]))  # four
    tight = Filter(broken.spent, DELTA, order=4)
    for _ in range(4):
        assert tight.allows(event, 2)
        tight.charge(event, 2)
        tight.restart()
    assert not tight.allows(event)
    with pytest.raises(UnsupportedEventError, match="mixes"):
        broken.allows(replace(event, adjacency=Adjacency.REPLACE_ONE))


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffled"])
def test_a_history_costs_what_a_filter_was_charged(entry: Make, sampling: str) -> None:
    one = entry(sampling, 0.1, 2.0, 7, period=10 if sampling == "shuffled" else 1)
    other = Entry(replace(one.event, noise_multiplier=3.0), 20)
    budget = Filter(50.0, DELTA, order=6)
    for part in (one, other, other):
        budget.charge(part.event, part.count)
        budget.restart()
    found = history_at(6, [one, other, other], DELTA)
    assert budget.spent < found < 1.001 * budget.spent  # a share of delta is kept for truncated batches
    assert history_at(6, [], DELTA) == 0
    cut = Entry(replace(entry("truncated-poisson", 0.1, 2.0, 9).event, excess=1e-4), 9)
    assert history_at(6, [cut], DELTA) == math.inf


@pytest.mark.parametrize("epsilon", [None, 0.5, 8.0])
def test_the_best_order_is_that_of_the_plan(entry: Make, epsilon: float | None) -> None:
    plan = entry("poisson", 0.02, 1.0, 300)
    order = best_order(plan, DELTA, epsilon)
    if epsilon is None:
        assert order == min(rdp.ORDERS, key=lambda o: epsilon_at(o, [plan]))
    else:
        assert order == Filter(epsilon, DELTA, plan=[plan]).order
    assert best_order(Entry(replace(plan.event, noise_multiplier=0.0), 3), DELTA, epsilon) in rdp.ORDERS


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 10.0])
def test_the_order_for_a_budget_is_best_for_gaussians(entry: Make, epsilon: float) -> None:
    z = 1 / gaussian.largest_mu(epsilon, DELTA)
    plan = [entry("full", 1.0, z, 1)]
    best = min(epsilon_at(order, plan) for order in rdp.ORDERS)
    assert epsilon_at(order_for_budget(epsilon, DELTA), plan) < 1.02 * best


def test_truncated_batches_need_a_plan_that_has_them(entry: Make) -> None:
    plain = entry("poisson", 0.01, 1.0, 100)
    cut = replace(plain.event, sampling=type(plain.event.sampling)("truncated-poisson"), excess=1e-12)
    budget = Filter(3.0, DELTA, plan=[plain])
    assert not budget.allows(cut)
    with pytest.raises(ConfigurationError, match="plan"):
        budget.charge(cut)
    budget = Filter(3.0, DELTA, plan=[Entry(cut, 100)])
    while budget.allows(cut):
        budget.charge(cut)
    excess = compose(budget.history).excess
    converted = epsilon_at(budget.order, budget.history)
    assert converted <= 3.0 and 0 < excess * (1 + math.exp(3.0)) <= DELTA * 1e-3


def test_one_order_is_fixed(entry: Make) -> None:
    plan = [entry("poisson", 0.01, 1.0, 700)]
    assert Filter(2.0, DELTA, order=8).order == 8
    assert Filter(2.0, DELTA, plan=plan).order in rdp.ORDERS
    for arguments in ({}, {"order": 8, "plan": plan}):
        with pytest.raises(ConfigurationError, match="order or plan"):
            Filter(2.0, DELTA, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"order=8\.55"):
        Filter(2.0, DELTA, order=8.55)
    for bad in ([], [entry("poisson", 0.1, 0.0, 3)]):
        with pytest.raises(ConfigurationError, match="plan"):
            Filter(2.0, DELTA, plan=bad)


def test_wrong_arguments(entry: Make) -> None:
    event = entry("full", 1.0, 5.0, 1).event
    for epsilon, delta, name in [(0, DELTA, "epsilon"), (math.nan, DELTA, "epsilon"), (1.0, 1.0, "delta")]:
        with pytest.raises(ConfigurationError, match=name):
            Filter(epsilon, delta, order=8)
    budget = Filter(5.0, DELTA, order=8)
    for count in (0, -1, 1.5):
        with pytest.raises(ConfigurationError, match="count"):
            budget.allows(event, count)  # type: ignore[arg-type]
    budget.charge(event)
    with pytest.raises(UnsupportedEventError, match="mixes"):
        budget.allows(replace(event, adjacency=Adjacency.REPLACE_ONE))
    assert not budget.allows(replace(event, noise_multiplier=0.0))
