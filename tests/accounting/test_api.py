from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipwise import accounting
from clipwise.accounting import from_arguments, gaussian
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Sampling

Make = Callable[..., Entry]
ORDINARY: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5}


def test_epsilon_noise_and_steps_agree() -> None:
    epsilon = accounting.epsilon(**ORDINARY)
    assert epsilon == pytest.approx(1.828, rel=1e-3)
    delta = accounting.delta(noise_multiplier=1.0, sample_rate=0.01, steps=1000, epsilon=epsilon)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    z = accounting.noise_multiplier(epsilon=epsilon, delta=1e-5, sample_rate=0.01, steps=1000)
    assert z == pytest.approx(1.0, rel=1e-3)


def test_any_unknown_can_be_computed() -> None:
    run: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5}
    most = accounting.steps(epsilon=2.0, sample_rate=0.01, **run)
    assert accounting.epsilon(sample_rate=0.01, steps=most, **run) <= 2.0
    assert accounting.epsilon(sample_rate=0.01, steps=most + 1, **run) > 2.0
    rate = accounting.sample_rate(epsilon=2.0, steps=1000, **run)
    assert accounting.epsilon(sample_rate=rate, steps=1000, **run) <= 2.0
    assert accounting.epsilon(sample_rate=1.002 * rate, steps=1000, **run) > 2.0
    rate = accounting.sample_rate(epsilon=2.0, epochs=10, sampling="fixed-size", **run)
    assert accounting.epsilon(sample_rate=rate, steps=math.ceil(10 / rate), sampling="fixed-size", **run) <= 2.0
    with pytest.raises(ConfigurationError, match=r"^sampling='full'.*'poisson', 'fixed-size', 'partition'"):
        accounting.sample_rate(epsilon=2.0, steps=10, sampling="full", **run)


def test_accountants_and_histories(entry: Make) -> None:
    history = [entry("poisson", 0.01, 1.0, 400), entry("poisson", 0.01, 1.0, 600)]
    for accountant in ("pld", "rdp"):
        assert accounting.epsilon_of(history, 1e-5, accountant) == accounting.epsilon(**ORDINARY, accountant=accountant)
    assert accounting.epsilon(**ORDINARY, accountant="rdp") > accounting.epsilon(**ORDINARY)
    assert accounting.delta_of(history, 2.0, "rdp") > accounting.delta_of(history, 2.0) > 0
    assert accounting.steps_within(history, history[0].event, 1.9, 1e-5, 10**4) > 0


def test_defaults_of_the_schemes() -> None:
    fixed = accounting.epsilon(**ORDINARY, sampling="fixed-size")
    assert fixed == accounting.epsilon(**ORDINARY, sampling=Sampling.PARTITION, adjacency="replace-one")
    full = accounting.epsilon(noise_multiplier=5.0, steps=4, delta=1e-5, sampling="full")
    assert full == pytest.approx(gaussian.epsilon(1e-5, 2 / 5), rel=1e-9)
    for period in ({"period": 10}, {"sample_rate": 0.1}, {"period": 10, "sample_rate": 0.1}):
        for adjacency in (None, Adjacency.REPLACE_ONE):
            shuffled = accounting.epsilon(
                noise_multiplier=5.0, steps=31, delta=1e-5, sampling="shuffled", adjacency=adjacency, **period
            )
            assert shuffled == full


def test_no_steps_and_no_noise() -> None:
    assert accounting.epsilon(**{**ORDINARY, "steps": 0}) == 0
    assert accounting.epsilon_of([], 1e-5) == 0
    assert accounting.epsilon(**{**ORDINARY, "noise_multiplier": 0}) == math.inf
    assert accounting.epsilon(**{**ORDINARY, "noise_multiplier": 0, "steps": 0}) == 0


@pytest.mark.parametrize(
    ("argument", "values", "allowed"),
    [
        ("noise_multiplier", [-1.0, math.nan, math.inf, None, "1", True], "finite number that is at least 0"),
        ("sample_rate", [0.0, -0.1, 1.1, math.nan, None, True], "greater than 0 and at most 1"),
        ("steps", [-1, 1.5, math.nan, math.inf, None, "3", True, 10**30], "whole number"),
        ("delta", [0.0, 1.0, -1e-5, math.nan, None], "greater than 0 and less than 1"),
        ("sampling", ["uniform", None, 3], "'poisson', 'truncated-poisson', 'fixed-size'"),
        ("adjacency", ["bounded", 3], "'zero-out', 'add-remove', 'replace-one'"),
        ("unit", ["token", None], "'record', 'microbatch', 'user'"),
        ("max_batch_size", [30], "unless sampling is 'truncated-poisson'"),
        ("accountant", ["moments", None], "'pld', 'rdp'"),
        ("period", [3], "unless sampling is 'shuffled'"),
    ],
)
def test_wrong_arguments_are_named(argument: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=f"^{argument}.*{allowed}"):
            accounting.epsilon(**{**ORDINARY, argument: value})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sampling": "full"}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": None}, "period"),
        ({"sampling": "shuffled", "sample_rate": 0.3}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": 0.1, "period": 11}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": None, "period": 0}, "period"),
        ({"adjacency": "replace-one"}, "adjacency"),
    ],
)
def test_arguments_that_do_not_fit_together_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}(=| must be)"):
        accounting.epsilon(**{**ORDINARY, **given})


def test_a_schedule_is_the_history_of_its_steps(entry: Make) -> None:
    run = {key: value for key, value in ORDINARY.items() if key not in ("noise_multiplier", "steps")}
    schedule = [1.0, 1.5, 1.0, 2.0] * 50
    by_hand = [entry("poisson", 0.01, z, n) for z, n in ((1.0, 100), (1.5, 50), (2.0, 50))]
    for accountant in ("pld", "rdp"):
        expected = accounting.epsilon_of(by_hand, 1e-5, accountant)
        for given in (schedule, tuple(schedule), np.array(schedule)):
            assert accounting.epsilon(noise_multiplier=given, **run, accountant=accountant) == expected
    assert accounting.epsilon(noise_multiplier=schedule, steps=200, **run) == accounting.epsilon_of(by_hand, 1e-5)
    assert accounting.delta(noise_multiplier=schedule, sample_rate=0.01, epsilon=1.0) == accounting.delta_of(
        by_hand, 1.0
    )
    assert accounting.epsilon(noise_multiplier=[1.0] * 1000, **run) == accounting.epsilon(**ORDINARY)
    assert accounting.epsilon(noise_multiplier=[], **run) == 0
    assert accounting.epsilon(noise_multiplier=[1.0, 0.0], **run) == math.inf


def test_a_long_schedule_is_rounded_to_less_noise_and_hardly_costs_more() -> None:
    schedule = np.random.default_rng(0).uniform(0.7, 6.0, 200_000)
    entries = from_arguments.history(schedule, sample_rate=0.001)
    assert len(entries) <= from_arguments.MOST_MULTIPLIERS and sum(entry.count for entry in entries) == 200_000
    rounded = np.repeat([e.event.noise_multiplier for e in entries], [e.count for e in entries])
    assert (rounded <= np.sort(schedule)).all()
    assert (rounded >= np.sort(schedule) * (1 - 1e-3)).all()
    silent = from_arguments.history(np.append(schedule, 0.0), sample_rate=0.001)
    assert silent[0].event.noise_multiplier == 0 and silent[0].count == 1


def test_a_shuffled_schedule_counts_each_epoch_at_its_least_noise() -> None:
    shuffled = {"sampling": "shuffled", "period": 3, "delta": 1e-5}
    found = accounting.epsilon(noise_multiplier=[4, 2, 4, 5, 5, 5, 3], **shuffled)  # type: ignore[arg-type]
    assert found == pytest.approx(gaussian.epsilon(1e-5, math.sqrt(1 / 4 + 1 / 25 + 1 / 9)), rel=1e-9)


@pytest.mark.parametrize(
    "schedule", [[1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0], [2.0]], [1.0, "x"], [1.0, None]]
)
def test_a_schedule_holds_multipliers(schedule: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^noise_multiplier"):
        accounting.epsilon(noise_multiplier=schedule, sample_rate=0.1, delta=1e-5)


def test_a_schedule_is_as_long_as_the_run() -> None:
    with pytest.raises(ConfigurationError, match=r"^steps must be left out or 3, the length of noise_multiplier"):
        accounting.epsilon(noise_multiplier=[1.0, 2.0, 3.0], steps=4, sample_rate=0.1, delta=1e-5)
    with pytest.raises(ConfigurationError, match=r"^steps must be"):
        accounting.epsilon(noise_multiplier=1.0, sample_rate=0.1, delta=1e-5)


def test_truncated_poisson_needs_the_number_of_units() -> None:
    cut = {**ORDINARY, "sampling": "truncated-poisson"}
    with pytest.raises(ConfigurationError, match=r"^dataset_size must be given"):
        accounting.epsilon(**cut)
    free = accounting.epsilon(**cut, dataset_size=10_000)
    assert free == pytest.approx(accounting.epsilon(**ORDINARY), rel=1e-5)
    assert accounting.epsilon(**cut, dataset_size=10_000, max_batch_size=10_000) == accounting.epsilon(**ORDINARY)
    some = accounting.epsilon(**cut, dataset_size=10_000, max_batch_size=170)
    assert free < some < math.inf
    assert accounting.epsilon(**cut, dataset_size=10_000, max_batch_size=100) == math.inf
    kept = {key: value for key, value in cut.items() if key != "noise_multiplier"}
    z = accounting.noise_multiplier(epsilon=2.0, **kept, dataset_size=10_000, max_batch_size=170)
    assert accounting.epsilon(**{**cut, "noise_multiplier": z}, dataset_size=10_000, max_batch_size=170) <= 2.0
    with pytest.raises(ConfigurationError, match=r"^max_batch_size is too small"):
        accounting.noise_multiplier(epsilon=2.0, **kept, dataset_size=10_000, max_batch_size=110)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, None])
def test_a_budget_is_positive(epsilon: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^epsilon must be"):
        accounting.noise_multiplier(epsilon=epsilon, delta=1e-5, sample_rate=0.1, steps=1)


def test_steps_may_be_a_whole_float() -> None:
    assert accounting.epsilon(**{**ORDINARY, "steps": 1000.0}) == accounting.epsilon(**ORDINARY)


def test_accounting_does_not_import_torch() -> None:
    folder = Path(accounting.__file__).parent
    assert [path.name for path in folder.glob("*.py") if "import torch" in path.read_text()] == []
