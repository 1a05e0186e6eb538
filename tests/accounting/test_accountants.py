from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipwise import accounting
from clipwise.accounting import accountants, pld, rdp
from clipwise.accounting.composition import compose
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.privacy import Adjacency, Entry

Make = Callable[..., Entry]


def test_accountants_are_called_by_name(entry: Make) -> None:
    history = [entry("full", 1.0, 4.0, 3)]
    exact = accountants.epsilon_of(history, 1e-5, "gdp")
    for name in ("pld", "rdp", "zcdp", "dp-accounting"):
        assert exact * (1 - 1e-9) <= accountants.epsilon_of(history, 1e-5, name) <= 1.2 * exact
        assert accountants.delta_of(history, exact, name) >= 1e-5 * (1 - 1e-6)
    assert set(accountants.ACCOUNTANTS) == {"pld", "rdp", "zcdp", "gdp", "dp-accounting"}


def test_a_composition_can_be_passed_directly(entry: Make) -> None:
    total = compose([entry("poisson", 0.01, 1.0, 100)])
    assert accountants.composed_epsilon(total, 1e-5) == pld.epsilon(total, 1e-5)
    assert accountants.composed_delta(total, 1.0, "rdp") == rdp.delta(total, 1.0)


@pytest.mark.parametrize("accountant", ["gdp", "zcdp"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_amplified_steps_are_refused_where_there_is_no_bound(entry: Make, accountant: str, sampling: str) -> None:
    for ask in (accountants.epsilon_of, accountants.delta_of):
        with pytest.raises(UnsupportedEventError, match=f"accountant='{accountant}'.*'pld'"):
            ask([entry(sampling, 0.1, 1.0, 3)], 0.1, accountant)
    unsampled = entry(sampling, 1.0, 1.0, 3)  # at rate 1 nothing is amplified
    assert accountants.epsilon_of([unsampled], 1e-5, accountant) > 0


def test_the_central_limit_is_refused(entry: Make) -> None:
    for ask in (accountants.epsilon_of, accountants.delta_of):
        with pytest.raises(UnsupportedEventError, match=r"no guarantee.*accounting\.central_limit"):
            ask([entry("poisson", 0.1, 1.0, 3)], 0.1, "clt")
    with pytest.raises(UnsupportedEventError, match="no guarantee"):
        accounting.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=3, delta=1e-5, accountant="clt")


def test_an_unknown_accountant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"accountant='moments'.*'pld', 'rdp', 'zcdp', 'gdp'"):
        accountants.epsilon_of([], 1e-5, "moments")


@pytest.mark.parametrize("accountant", [np.array([1.0, 2.0]), ["pld"], None, 3])
def test_an_accountant_that_is_not_a_string_is_refused(accountant: Any) -> None:
    for ask in (accountants.epsilon_of, accountants.delta_of):
        with pytest.raises(ConfigurationError, match=r"accountant.*'pld', 'rdp', 'zcdp', 'gdp'"):
            ask([], 0.1, accountant)


def test_add_remove_costs_what_zero_out_costs(entry: Make) -> None:
    for sampling in ("poisson", "truncated-poisson"):
        both = [entry(sampling, 0.02, 0.9, 300, adjacency=a) for a in (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE)]
        costs = {accountants.epsilon_of([one], 1e-5, accountant) for one in both for accountant in ("pld",)}
        assert len(costs) == 1
        with pytest.raises(UnsupportedEventError, match="mixes"):
            accountants.epsilon_of(both, 1e-5)
