"""The paper's numbers, and what its noise is worth."""

import math

import pytest

from clipwise import accounting
from experiments.backprop_clipping.claims import CLAIMS, DELTA
from experiments.backprop_clipping.withdrawn import Withdrawn, epsilon_of_last_layer


def test_the_noise_is_that_of_theorem_1() -> None:
    """From sigma back to the epsilon that the paper prints, by its own formulas."""
    for claim in CLAIMS.values():
        bound = claim.input_norm * claim.grad_norm
        rho = claim.epochs * claim.layers * bound**2 / (2 * claim.noise**2)
        assert math.isclose(rho + 2 * math.sqrt(rho * math.log(1 / DELTA)), claim.epsilon, rel_tol=1e-9)
    assert math.isclose(CLAIMS["mnist"].noise, 6.87, rel_tol=1e-3)


@pytest.mark.parametrize(("kind", "least", "most"), [("honest", 0.088, 0.09), ("as published", 3000, 9000)])
def test_what_the_noise_buys(kind: str, least: float, most: float) -> None:
    """z has the factor 2 of a replaced record; only the clip differs between the two."""
    job = Withdrawn("mnist", kind)
    spent = accounting.epsilon(
        noise_multiplier=job.noise_multiplier,
        sampling="shuffled",
        adjacency="replace-one",
        period=1,
        steps=25,
        delta=DELTA,
    )
    assert least < spent < most


def test_the_last_layer_alone_contradicts_the_claims() -> None:
    assert math.isclose(epsilon_of_last_layer(CLAIMS["mnist"]), 4.53, rel_tol=1e-3)
    for claim in CLAIMS.values():
        assert epsilon_of_last_layer(claim) > claim.epsilon


def test_rows_of_the_table_have_what_is_printed() -> None:
    assert CLAIMS["mnist"].printed("upstream-clip") == 0.987
    assert CLAIMS["cifar10"].printed("dp-sgd-tanh") == 0.662
    assert CLAIMS["mnist"].printed("gradient-normalize") is None
    assert (CLAIMS["mnist"].printed("clipped-upstream"), CLAIMS["mnist"].printed("clipped")) == (0.989, None)
