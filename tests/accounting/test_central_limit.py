from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from clipwise import accounting
from clipwise.accounting.central_limit import mu_of_step
from clipwise.accounting.composition import Step
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Amplification

# "Batch clipping and adaptive layerwise clipping for differential private stochastic gradient descent" (Nguyen et
# al.): N = 54000, microbatches of 64, 50 epochs, 8 layers. sigma, mu; epsilon at 1e-5 if mu were true.
PAPER = [(2.5, 0.52, 2.088), (1.5, 1.99, 9.94)]


@pytest.mark.parametrize(("sigma", "mu", "epsilon"), PAPER)
def test_the_numbers_of_the_batch_clipping_paper(sigma: float, mu: float, epsilon: float) -> None:
    run = {
        "noise_multiplier": sigma / math.sqrt(8),
        "sample_rate": 64 / 54000,
        "steps": 50 * 54000 // 64,
        "sampling": "partition",
    }
    found = accounting.central_limit(**run)  # type: ignore[arg-type]
    assert found.mu == pytest.approx(mu, abs=0.005)
    assert found.epsilon_if_it_were_true(1e-5) == pytest.approx(epsilon, rel=1e-3)
    exact = accounting.epsilon(**run, delta=1e-5)  # type: ignore[arg-type]
    assert exact == pytest.approx(found.epsilon_if_it_were_true(1e-5), rel=0.03)  # close here, on either side


# z, rate, steps, epsilon at 1e-5 of Poisson sampling by this approximation.
@pytest.mark.parametrize(
    ("z", "rate", "steps", "epsilon"),
    [
        (1.1, 256 / 60000, 14062, 2.324),
        (0.925, 1024 / 60000, 586, 2.515),
        (0.7, 1024 / 60000, 59, 1.296),
        (1.0, 0.01, 1000, 1.618),
    ],
)
def test_it_under_reports(z: float, rate: float, steps: int, epsilon: float) -> None:
    found = accounting.central_limit(noise_multiplier=z, sample_rate=rate, steps=steps)
    assert found.epsilon_if_it_were_true(1e-5) == pytest.approx(epsilon, rel=1e-3)
    exact = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=1e-5)
    assert found.epsilon_if_it_were_true(1e-5) < exact


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_mu_is_the_standard_deviation_of_the_likelihood_ratio(z: float) -> None:
    """Small rates: the loss is q (r - 1) with r the likelihood ratio; C_q takes the larger direction by sign."""

    def moment(of: object) -> float:
        x = np.linspace(-12 * z, 12 * z + 1, 400_001)
        return float(integrate.simpson(of(x) * stats.norm.pdf(x, 0, z), x=x))  # type: ignore[operator]

    rate = 1e-4
    selected = moment(lambda x: np.expm1((x - 0.5) / z**2) ** 2)
    assert mu_of_step(Step(Amplification.POISSON, rate, z)) == pytest.approx(rate * math.sqrt(selected), rel=1e-6)
    draw = 2 * moment(lambda x: np.maximum(np.expm1((x - 0.5) / z**2), 0) ** 2)
    assert mu_of_step(Step(Amplification.WITHOUT_REPLACEMENT, rate, z)) == pytest.approx(
        rate * math.sqrt(draw), rel=1e-6
    )


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_much_noise(sampling: str) -> None:
    """mu is rate sqrt(steps) / z there. Accountants use less noise, which gives a bound; this is no bound."""
    for z in (1e5, 1e6, 4e6, 1e7, 1e8, 1e9, 1e12):
        found = accounting.central_limit(noise_multiplier=z, sample_rate=0.5, steps=10_000, sampling=sampling)
        assert found.mu * z == pytest.approx(50, rel=1e-4)
    rare = accounting.central_limit(noise_multiplier=1.0, sample_rate=1e-14, steps=1, sampling=sampling)
    usual = accounting.central_limit(noise_multiplier=1.0, sample_rate=1e-4, steps=1, sampling=sampling)
    assert rare.mu == pytest.approx(1e-10 * usual.mu, rel=1e-9)


def test_an_entry_with_count_zero_costs_nothing() -> None:
    none = accounting.central_limit(noise_multiplier=0.02, sample_rate=0.1, steps=0)
    assert none.mu == 0


def test_without_amplification_it_is_exact() -> None:
    found = accounting.central_limit(noise_multiplier=4.0, steps=9, sampling="full")
    assert found.mu == pytest.approx(3 / 4)
    assert accounting.central_limit(noise_multiplier=0.02, sample_rate=0.1, steps=9).mu == math.inf


def test_it_is_not_presented_as_a_guarantee() -> None:
    found = accounting.central_limit(noise_multiplier=1.0, sample_rate=0.01, steps=1000)
    assert "no guarantee" in str(found)
    assert not {"epsilon", "delta"} & set(dir(found))
    with pytest.raises(UnsupportedEventError, match="hope"):
        mu_of_step(Step("hope", 0.1, 1.0))  # type: ignore[arg-type]
