"""The declared grid of the batch-clipping paper."""

import dataclasses
import math

import pytest

from experiments import models
from experiments.batch_clipping import strategies, tuned
from experiments.batch_clipping.figures import FIGURES
from experiments.batch_clipping.setting import Setting

BY_NAME = {figure.name: figure for figure in FIGURES}


def network(setting):
    small = {"width": 4} if setting.model == "resnet18" else {}
    return models.build(setting.model, norm=setting.norm, **small)


def multiplier(row):
    return strategies.joint_multiplier(row.setting, network(row.setting))


def test_figures_4_18_and_appendix_b_come_first_and_in_full():
    assert [figure.name for figure in FIGURES[:3]] == ["4", "18", "B"]
    assert {row.setting.epochs for figure in FIGURES[:3] for row in figure.rows} == {50}
    assert set(BY_NAME) == {str(n) for n in range(1, 19)} | {"B"}


def test_shortened_figures_are_marked():
    for figure in FIGURES[3:]:
        assert all(row.setting.epochs <= 10 and row.epochs_in_paper in (10, 50) for row in figure.rows)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_private_figures_have_flat_rows_with_group_norm_at_equal_privacy(figure):
    private = [row for row in figure.rows if row.setting.is_private]
    flat = [r for r in private if r.setting.clip == "example" and r.setting.parts == "all"]
    assert bool(flat) == bool(private)
    assert all(row.setting.norm == "group" for row in flat)
    layerwise = [multiplier(r) for r in private if r.setting.parts == "enhanced"]
    for row in private:
        if "privacy" in row.label:
            z = multiplier(row)
            assert any(math.isclose(z, other, rel_tol=1e-12) for other in layerwise), row.label


def test_the_papers_settings():
    assert [row.setting.max_norm for row in BY_NAME["4"].rows[:2]] == [0.0095, 0.095]
    alc, equal_noise, equal_privacy = (row.setting for row in BY_NAME["18"].rows[:3])
    assert (alc.learning_rate, alc.decay, alc.batch_size, alc.sigma) == (0.025, 0.9, 64, 0.01875)
    assert strategies.number_of_parts(alc, network(alc)) == 62
    assert equal_noise.sigma == alc.sigma and math.isclose(equal_privacy.sigma, alc.sigma / math.sqrt(62))


def test_no_row_trains_batch_norm_by_single_examples():
    rows = [row.setting for figure in FIGURES for row in figure.rows] + list(tuned.METHODS.values())
    assert not any(setting.clip == "example" and setting.norm == "batch" for setting in rows)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Setting)])
def test_settings_that_differ_have_other_keys(field):
    usual = Setting()
    value = getattr(usual, field)
    other = "other" if isinstance(value, str) else not value if isinstance(value, bool) else 7
    assert usual.but(**{field: other}).key != usual.key


def test_every_method_has_as_many_trials():
    tried = {method: tuned.trials(method, 3.0) for method in tuned.METHODS}
    assert {len(trials) for trials in tried.values()} == {6}
    assert {s.sampling for trials in tried.values() for s in trials} == {"poisson"}
    assert {s.epsilon for trials in tried.values() for s in trials} == {3.0}


@pytest.mark.parametrize("method", tuned.METHODS)
def test_trials_are_walks_whatever_the_batch_size(method):
    """rate sqrt(T) is the walk."""
    for trial, walk in zip(tuned.trials(method, 1.0), tuned.WALKS * 2, strict=True):
        steps = trial.epochs * 54_000 / trial.batch_size
        assert trial.noise_rate * math.sqrt(steps) == pytest.approx(walk, rel=0.05)


def test_the_page_has_every_strategy_and_the_flat_row_with_group_norm():
    found = {(s.clip, s.parts) for s in tuned.METHODS.values()}
    for parts in ("all", "enhanced", "groups", "multipliers", "multipliers-paper"):
        assert {("batch", parts), ("example", parts)} <= found
    assert ("batch", "zhang") in found
    assert any(s.sparse_from for s in tuned.METHODS.values()) and any(s.local_rate for s in tuned.METHODS.values())
    first = next(iter(tuned.METHODS.values()))
    assert (first.clip, first.parts, first.norm) == ("example", "all", "group")
