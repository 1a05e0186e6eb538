"""A noise multiplier is noise over the sensitivity under its own adjacency, for every accountant.

dp-accounting's accountants disagree under replace-one: its RDP uses this definition, its PLD uses noise over the bound
of one record, half the sensitivity. Both are compared here with closed forms, and so are the accountants built on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions

from clipwise import accounting
from clipwise.accounting import accountants, gaussian, rdp
from clipwise.accounting.composition import compose
from clipwise.privacy import SUPPORTED, Adjacency, Entry, Sampling, Unit

Make = Callable[..., Entry]
DELTA = 1e-5
Z = 2.0


def test_dp_accounting_uses_two_definitions_of_the_multiplier() -> None:
    one_sensitivity, two = gaussian.epsilon(DELTA, 1 / Z), gaussian.epsilon(DELTA, 2 / Z)
    by_distribution = {
        relation: distributions.from_gaussian_mechanism(Z, neighboring_relation=relation).get_epsilon_for_delta(DELTA)
        for relation in (distributions.NeighborRel.ADD_OR_REMOVE_ONE, distributions.NeighborRel.REPLACE_ONE)
    }
    assert list(by_distribution.values()) == pytest.approx([one_sensitivity, two], rel=1e-3)
    for relation in (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE):
        accountant = dp.rdp.RdpAccountant(rdp.ORDERS, relation)
        accountant.compose(dp.GaussianDpEvent(Z))
        assert accountant.rdp == pytest.approx(rdp.ORDERS / (2 * Z**2))


@pytest.mark.parametrize("accountant", ["pld", "rdp", "zcdp", "gdp", "dp-accounting"])
@pytest.mark.parametrize(
    ("sampling", "adjacency"), [(s, a) for s, allowed in SUPPORTED.items() for a in allowed], ids=str
)
def test_at_rate_one_every_scheme_is_the_same_gaussian(
    entry: Make, accountant: str, sampling: Sampling, adjacency: Adjacency
) -> None:
    history = [entry(sampling, 1.0, Z, 3, adjacency=adjacency)]
    exact = gaussian.epsilon(DELTA, math.sqrt(3) / Z)
    assert compose(history).mu == pytest.approx(math.sqrt(3) / Z, rel=1e-12)
    assert exact <= accountants.epsilon_of(history, DELTA, accountant) * (1 + 1e-9)
    assert accountants.epsilon_of(history, DELTA, accountant) <= exact * (
        1.15 if accountant in ("rdp", "zcdp") else 1.001
    )


@pytest.mark.parametrize(("rate", "z"), [(0.1, 1.0), (0.3, 2.0)])
def test_one_amplified_step_has_the_closed_form_of_its_scheme(entry: Make, rate: float, z: float) -> None:
    """With z = noise / sensitivity the worst pair is N(0, z^2) against its mixture with N(1, z^2), on both sides."""
    for epsilon in (0.05, 0.3, 1.0):
        exact = float(gaussian.hockey_stick(np.array([epsilon]), rate, z)[0])
        for sampling in ("poisson", "truncated-poisson", "fixed-size", "partition"):
            found = accountants.delta_of([entry(sampling, rate, z, 1)], epsilon)
            assert exact <= found <= exact * 1.003 + 1e-12
            assert accountants.delta_of([entry(sampling, rate, z, 1)], epsilon, "rdp") >= exact


@pytest.mark.parametrize("unit", Unit)
def test_the_unit_is_named_and_does_not_change_the_figure(unit: Unit) -> None:
    run: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100, "delta": DELTA}
    assert (
        accounting.epsilon(**run, unit=unit) == accounting.epsilon(**run, unit=str(unit)) == accounting.epsilon(**run)
    )
