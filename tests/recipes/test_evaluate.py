"""Figures of accuracy: their noise, their ledger, and intervals that cover what they claim."""

from __future__ import annotations

import numpy as np
import pytest

from clipwise.errors import ConfigurationError
from clipwise.ledger.ledger import read
from clipwise.recipes.evaluate import Groups, exact_figures, noised_figures
from clipwise.recipes.finish import rounded
from clipwise.recipes.kind import Task
from clipwise.recipes.planning import evaluation_event

EVENT = evaluation_event(1.0, 1e-5)


class Classifier:
    task = Task(labels=("a", "b"))


class Regressor:
    task = Task(range=(0.0, 10.0))


def noised(encoder, scores, path, **options):
    options = {"epsilon": 1.0, "delta": 1e-5} | options
    return noised_figures(encoder, np.asarray(scores, float), EVENT, path, **options)


def test_an_exact_accuracy_has_the_interval_of_clopper_and_pearson():
    (figure,) = exact_figures(Classifier(), np.array([1.0] * 80 + [0.0] * 20))
    assert (figure.name, figure.value, figure.rows) == ("accuracy", 0.8, "public-test")
    # The exact binomial interval at 96%.
    assert figure.low == pytest.approx(0.7040, abs=2e-3) and figure.high == pytest.approx(0.8770, abs=2e-3)


def test_a_noised_accuracy_is_charged_once_and_is_wider(tmp_path):
    scores = [1.0] * 80 + [0.0] * 20
    (figure,) = noised(Classifier(), scores, tmp_path / "ledger")
    (exact,) = exact_figures(Classifier(), np.array(scores))
    assert figure.rows == "held-out" and figure.high - figure.low > exact.high - exact.low
    found = read(tmp_path / "ledger")
    assert found.position == 1 and found.history[0].event == EVENT and found.header == {"dataset_size": 100}


def test_the_noise_is_fresh_unless_seeded(tmp_path):
    values = [noised(Classifier(), [1.0] * 9, tmp_path / f"{i}")[0].value for i in range(2)]
    values += [noised(Classifier(), [1.0] * 50 + [0.0] * 50, tmp_path / f"s{i}", seed=1)[0].value for i in range(2)]
    assert values[2] == values[3] != 0.5


def test_noised_counts_are_whole_numbers(tmp_path):
    """The low bits of a count of 0 would differ from those of a count of 1."""
    values = [noised(Classifier(), [1.0] * 30 + [0.0] * 34, tmp_path / f"{i}")[0].value * 64 for i in range(20)]
    assert all(value == round(value) for value in values) and len(set(values)) > 1


def test_the_intervals_cover_the_figure_of_the_population(tmp_path):
    random, missed = np.random.default_rng(0), 0
    for run in range(200):
        scores = (random.random(60) < 0.7).astype(float)
        (figure,) = noised(Classifier(), scores, tmp_path / f"{run}", seed=run)
        missed += not figure.low <= 0.7 <= figure.high
    assert missed <= 12  # 5% of 200 is 10; the intervals are conservative


def test_the_intervals_of_regressions_cover_the_error(tmp_path):
    random, missed = np.random.default_rng(0), 0
    for run in range(100):
        scores = random.random(80) ** 2
        scores[random.random(80) < 0.1] = np.nan
        (figure,) = noised(Regressor(), scores, tmp_path / f"{run}", seed=run)
        assert figure.name == "root mean squared error" and figure.low <= figure.value <= figure.high
        missed += not figure.low <= 10 * (1 / 3) ** 0.5 <= figure.high
    assert missed <= 5


def test_groups_have_their_own_figures(tmp_path):
    groups = Groups(("north", "south", "nobody"), np.array([0] * 50 + [1] * 50))
    scores = [1.0] * 50 + [0.0] * 50
    exact = exact_figures(Classifier(), np.array(scores), groups)
    assert [(f.group, f.value) for f in exact] == [(None, 0.5), ("north", 1.0), ("south", 0.0), ("nobody", 0.5)]
    assert (exact[3].low, exact[3].high) == (0.0, 1.0)
    found = noised(Classifier(), scores, tmp_path / "ledger", groups=groups)
    assert [f.group for f in found] == [None, "north", "south", "nobody"]
    assert read(tmp_path / "ledger").position == 1  # one joint release


def test_an_error_that_the_noise_hides_is_not_shown_as_none():
    figure = {"name": "root mean squared error", "value": 0.0, "low": 0.0, "high": 12345.6, "rows": "held-out"}
    assert rounded(figure) == "root mean squared error too small for the noise (0 to 12346) on held-out rows"


def test_groups_of_a_regression_are_refused(tmp_path):
    groups = Groups(("a",), np.zeros(3, int))
    with pytest.raises(ConfigurationError, match="--groups"):
        noised(Regressor(), [0.1] * 3, tmp_path / "ledger", groups=groups)
    assert not (tmp_path / "ledger").exists()
