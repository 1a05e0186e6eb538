"""The recipe of `clipwise tune`: the cost of a run, and the validation records."""

import pytest

from clipwise import accounting
from clipwise.recipes.digits import digits
from clipwise.recipes.tuning import RECIPES, _parts

SETTINGS = {"noise_multiplier": 2.0, "max_norm": 0.5, "sample_rate": 0.25, "learning_rate": 0.2, "epochs": 1}


def test_the_cost_of_a_run_follows_from_its_release():
    recipe = RECIPES["digits"]
    run = recipe.train(SETTINGS, 0)
    z, rate, steps = run.release
    assert (z, rate, steps) == (2.0, 0.25, 4) and 0 <= run.right <= run.size == 288
    expected = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=recipe.delta)
    assert run.epsilon == pytest.approx(expected, rel=1e-6)


def test_validation_records_are_not_trained_on():
    train, validation = _parts()
    assert len(train) + len(validation) == len(digits(train=True))
    rows = {tuple(row.flatten().tolist()) for row in train.tensors[0]}
    assert not any(tuple(row.flatten().tolist()) in rows for row in validation.tensors[0])


def test_settings_that_decide_privacy_are_not_free():
    assert set(RECIPES["digits"].free_space) == {"max_norm", "learning_rate"}
