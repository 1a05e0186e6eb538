"""The cost of a search: the plan keeps its budget, and nothing else is released."""

import math

import pytest

from clipwise import accounting
from clipwise.errors import ConfigurationError
from clipwise.tune import Range
from clipwise.tune.selection import Repetitions, SelectionPlan, composed_epsilon, plan, select
from clipwise.tune.subject import Score

RUN = {"sample_rate": 0.05, "steps": 200}


@pytest.mark.parametrize(("epsilon", "mean"), [(1.0, 3.0), (4.0, 20.0)])
def test_the_plan_keeps_its_budget_for_both_kinds_of_record(epsilon, mean):
    found = plan(epsilon, 1e-5, mean=mean, **RUN)
    common = {"mean": mean, "delta": 1e-5, "adjacency": "zero-out"}
    trained = accounting.search(noise_multiplier=found.noise_multiplier, **RUN, **common)
    validated = accounting.search(noise_multiplier=found.score_noise, steps=1, sampling="full", **common)
    assert 0.98 * epsilon <= trained <= epsilon
    assert 0.98 * epsilon <= validated <= epsilon


def test_more_runs_need_more_noise_and_each_costs_less_than_the_search():
    few, many = (plan(2.0, 1e-5, mean=mean, **RUN) for mean in (2.0, 50.0))
    assert few.noise_multiplier < many.noise_multiplier
    assert many.epsilon_of_a_run < few.epsilon_of_a_run < 2.0


def test_an_impossible_budget_is_refused():
    with pytest.raises(ConfigurationError, match="too small for this search"):
        plan(1e-7, 1e-5, mean=1e6, **RUN)


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, 0.0, 1e6])
def test_an_invalid_budget_is_refused(epsilon):
    with pytest.raises(ConfigurationError, match=r"epsilon must be .* greater than 0 and less than"):
        plan(epsilon, 1e-5, mean=3.0, **RUN)


def quiet(mean: float, score_noise: float = 1e-6) -> SelectionPlan:
    return SelectionPlan(1.0, 1e-5, mean, 1.0, 1.0, score_noise, 0.5)


def test_the_best_run_is_released():
    tried = []

    def run(settings):
        tried.append(settings["rate"])
        return round(100 * settings["rate"]), 100, settings["rate"]

    found = select(quiet(30.0), {"rate": Range(0, 1)}, run)
    assert found.output == pytest.approx(max(tried), abs=0.01)
    assert found.noised_accuracy == pytest.approx(max(tried), abs=0.01)


def test_the_score_is_noised():
    scores = {
        select(quiet(2.0, score_noise=5.0), {"rate": Range(0, 1)}, lambda s: (50, 100, None)).noised_accuracy
        for _ in range(4)
    }
    assert len(scores) == 4 and 0.5 not in scores


def test_the_number_of_runs_is_drawn_from_the_distribution_that_is_accounted_for(monkeypatch):
    calls, drawn = [], []
    draw = Repetitions.draw

    def noted(self, random=None):
        drawn.append((self, draw(self, random)))
        return drawn[-1][1]

    monkeypatch.setattr(Repetitions, "draw", noted)
    select(quiet(7.0), {"rate": Range(0, 1)}, lambda s: (calls.append(s) or 1, 2, None))
    assert drawn[0][0] == Repetitions(7.0, 1.0) and len(calls) == drawn[0][1]


def test_no_run_means_no_result(monkeypatch):
    monkeypatch.setattr(Repetitions, "draw", lambda self, random=None: 0)
    assert select(quiet(2.0), {"rate": Range(0, 1)}, lambda s: (1, 2, None)) is None


def test_all_runs_compose():
    one = Score(0.9, 1.0, 1e-5, (2.0, 0.1, 50))
    epsilon, delta = composed_epsilon([one, one])
    expected = accounting.epsilon(noise_multiplier=2.0, sample_rate=0.1, steps=100, delta=1e-5)
    assert epsilon == pytest.approx(expected) and delta == 1e-5


def test_many_different_runs_are_bounded_by_rdp():
    scores = [Score(0.9, 1.0, 1e-5, (2.0 + i, 0.1, 50)) for i in range(12)]
    epsilon, _ = composed_epsilon(scores)
    assert math.isfinite(epsilon) and epsilon > max(composed_epsilon([s])[0] for s in scores)


def test_without_the_releases_of_runs_nothing_is_claimed():
    assert composed_epsilon([Score(0.9, 1.0)]) is None
    assert composed_epsilon([]) is None
