"""The numbers of the batch-clipping paper's appendix B, recomputed."""

import math

import pytest

from clipwise import accounting
from experiments.batch_clipping import appendix

LINES = {line.stated.sigma: line for line in appendix.recomputed()}


@pytest.mark.parametrize(("sigma", "h", "mu"), [(2.5, 1.5142, 0.5213), (1.5, 5.7831, 1.9909)])
def test_the_papers_own_formula_gives_what_it_states(sigma, h, mu):
    line = LINES[sigma]
    assert line.h == pytest.approx(h, abs=1e-4) == pytest.approx(line.stated.h, abs=2e-3)
    assert line.mu == pytest.approx(mu, abs=1e-4) == pytest.approx(line.stated.mu, abs=2e-3)


@pytest.mark.parametrize("sigma", [2.5, 1.5])
def test_mu_is_that_of_the_accountants_diagnostic(sigma):
    found = accounting.central_limit(
        noise_multiplier=sigma / math.sqrt(8), sample_rate=64 / 54_000, steps=42_187, sampling="fixed-size"
    )
    assert found.mu == pytest.approx(LINES[sigma].mu, rel=1e-4)


@pytest.mark.parametrize(("sigma", "epsilon"), [(2.5, 2.0825), (1.5, 9.697), (0.5, 835.93)])
def test_epsilon_by_exact_accounting(sigma, epsilon):
    assert LINES[sigma].epsilon == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("sigma", [2.5, 1.5])
def test_renyi_accounting_agrees_from_above(sigma):
    looser = accounting.epsilon(
        noise_multiplier=sigma / math.sqrt(8),
        sample_rate=64 / 54_000,
        steps=42_187,
        delta=1e-5,
        sampling="fixed-size",
        accountant="rdp",
    )
    assert LINES[sigma].epsilon < looser < 1.6 * LINES[sigma].epsilon


def test_layers_cost_privacy():
    for line in LINES.values():
        assert line.flat_epsilon < line.epsilon / 5
        assert line.poisson_epsilon < line.epsilon
