from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipwise import accounting
from clipwise.accounting import gaussian
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Sampling

Make = Callable[..., Entry]
ORDINARY: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5}


def test_the_three_questions_agree() -> None:
    epsilon = accounting.epsilon(**ORDINARY)
    assert epsilon == pytest.approx(1.828, rel=1e-3)
    delta = accounting.delta(noise_multiplier=1.0, sample_rate=0.01, steps=1000, epsilon=epsilon)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    z = accounting.noise_multiplier(epsilon=epsilon, delta=1e-5, sample_rate=0.01, steps=1000)
    assert z == pytest.approx(1.0, rel=1e-3)


def test_accountants_and_histories(entry: Make) -> None:
    history = [entry("poisson", 0.01, 1.0, 400), entry("poisson", 0.01, 1.0, 600)]
    for accountant in ("pld", "rdp"):
        assert accounting.epsilon_of(history, 1e-5, accountant) == accounting.epsilon(
            **ORDINARY, accountant=accountant
        )
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
        ("noise_multiplier", [-1.0, math.nan, math.inf, None, "1", True], "at least 0 and finite"),
        ("sample_rate", [0.0, -0.1, 1.1, math.nan, None, True], r"\(0, 1\]"),
        ("steps", [-1, 1.5, math.nan, math.inf, None, "3", True, 10**30], "whole number"),
        ("delta", [0.0, 1.0, -1e-5, math.nan, None], "greater than 0 and less than 1"),
        ("sampling", ["uniform", None, 3], "'poisson', 'fixed-size', 'partition', 'shuffled', 'full'"),
        ("adjacency", ["add-remove", 3], "'zero-out', 'replace-one'"),
        ("accountant", ["gdp", None], "'pld', 'rdp'"),
        ("period", [3], "unless sampling is 'shuffled'"),
    ],
)
def test_wrong_arguments_are_named(argument: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=f"^{argument}=.*{allowed}"):
            accounting.epsilon(**{**ORDINARY, argument: value})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sampling": "full"}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": None}, "period"),
        ({"sampling": "shuffled", "sample_rate": 0.3}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": 0.1, "period": 11}, "sample_rate"),
        ({"sampling": "shuffled", "sample_rate": None, "period": 0}, "period"),
        ({"adjacency": "replace-one"}, "adjacency"),
    ],
)
def test_arguments_that_do_not_fit_together_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}="):
        accounting.epsilon(**{**ORDINARY, **arguments})


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, None])
def test_a_budget_is_positive(epsilon: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^epsilon="):
        accounting.noise_multiplier(epsilon=epsilon, delta=1e-5, sample_rate=0.1, steps=1)


def test_whole_floats_are_steps() -> None:
    assert accounting.epsilon(**{**ORDINARY, "steps": 1000.0}) == accounting.epsilon(**ORDINARY)


def test_works_without_dp_accounting_and_says_what_is_missing() -> None:
    program = """
import sys
sys.modules["dp_accounting"] = None
from clipwise import accounting
ordinary = dict(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5)
print(round(accounting.epsilon(**ordinary), 2))
try:
    accounting.epsilon(**ordinary, accountant="rdp")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    epsilon, message = done.stdout.strip().splitlines()
    assert epsilon == "1.83"
    assert "pip install dp-accounting" in message


def test_accounting_knows_nothing_about_tensors() -> None:
    room = Path(accounting.__file__).parent
    assert [path.name for path in room.glob("*.py") if "import torch" in path.read_text()] == []
