from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from clipwise import accounting
from clipwise.errors import ConfigurationError
from clipwise.privacy import Entry
from clipwise.recipes.config import Choices
from clipwise.recipes.digits import DigitsSource
from clipwise.recipes.planning import counts_event, default_delta, evaluation_event, plan_of, split

CHOICES = Choices(path="digits", epsilon=3.0)


def test_the_split_depends_on_positions_alone():
    training, held_out = split(25, Fraction(1, 10))
    assert held_out.tolist() == [9, 19]
    assert sorted([*training, *held_out]) == list(range(25))
    assert split(7, Fraction(0))[1].size == 0
    assert split(2, Fraction(1, 10))[0].tolist() == [0, 1]
    assert len(split(1000, Fraction(1, 4))[1]) == 250


def test_no_rows_are_refused():
    with pytest.raises(ConfigurationError, match="no rows"):
        split(0, Fraction(1, 10))


@pytest.mark.parametrize("rows", [2, 569, 10_000, 32_561, 60_000, 99_999, 100_000, 1_000_000])
def test_the_default_delta_is_below_a_tenth_of_one_over_the_rows(rows):
    delta = default_delta(rows)
    assert delta <= 1e-5 and (rows < 10_000 or 0.04 / rows < delta <= 0.1 / rows)


def test_the_whole_run_is_within_the_budget_and_uses_it():
    plan = plan_of(CHOICES)
    assert 0.98 * 3 < accounting.epsilon_of(plan.releases(), plan.delta) <= 3
    assert plan.steps == 120 and len(plan.training_rows) + len(plan.held_out_rows) == 1437


def test_counts_take_their_share_of_the_same_budget(monkeypatch):
    monkeypatch.setattr(DigitsSource, "needs_counts", lambda self: True)
    plan = plan_of(replace(CHOICES, counts_share=0.2))
    assert plan.counts is not None and plan.counts.purpose == "preparation" and plan.counts.excess > 0
    assert 0.98 * 3 < accounting.epsilon_of(plan.releases(), plan.delta) <= 3
    more = plan_of(replace(CHOICES, counts_share=0.5))
    assert more.event.noise_multiplier > plan.event.noise_multiplier
    assert more.counts.noise_multiplier < plan.counts.noise_multiplier


def test_a_share_is_a_share_of_the_square_of_mu():
    epsilon, delta = 1.0, 1e-5
    whole = accounting.epsilon_of([Entry(counts_event(0.5, epsilon, delta), 2)], delta)
    assert 0.95 * epsilon < whole <= epsilon * 1.05


def test_figures_on_held_out_rows_cost_at_most_the_budget():
    event = evaluation_event(2.0, 1e-6)
    assert 1.95 < accounting.epsilon_of([Entry(event, 1)], 1e-6) <= 2.0


def test_without_privacy_nothing_is_charged():
    plan = plan_of(replace(CHOICES, epsilon=math.inf))
    assert plan.event is plan.counts is plan.evaluation is None and plan.releases() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epsilon": None}, "--epsilon is needed"),
        ({"delta": 0.01}, "--delta"),
        ({"batch_size": 5000}, "--batch-size"),
        ({"path": "nothing.csv"}, "nothing.csv"),
    ],
)
def test_what_cannot_be_planned_is_refused(change, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_of(replace(CHOICES, **change))


def test_a_batch_is_never_larger_than_the_training_rows():
    class Small(DigitsSource):
        def __len__(self):
            return 30

    plan = plan_of(CHOICES, Small(train=True))
    assert plan.settings.batch_size == 27 and plan.event.sample_rate == 1
    assert np.array_equal(plan.held_out_rows, [9, 19, 29])
