"""Distributed noise of clients: clipped vectors and shares on a common grid."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from clipwise.noise.shares import noised_share, on_grid, share_std

SIZE = 20_000


def share(std: float = 0.5) -> Tensor:
    return noised_share({"w": torch.zeros(SIZE)}, 1.0, std)["w"]


def require_variance(values: Tensor, variance: float) -> None:
    """A two-sided chi-square test at 1e-6."""
    statistic = float((values.double() ** 2).sum()) / variance
    assert 5e-7 < stats.chi2.cdf(statistic, values.numel()) < 1 - 5e-7


def test_the_shares_of_the_honest_clients_sum_to_the_noise_of_the_step() -> None:
    std = share_std(2.0, honest=7)
    assert 7 * std**2 >= 4.0
    total = sum((share(std) for _ in range(7)), torch.zeros(SIZE))
    require_variance(total, 4.0)
    assert stats.kstest(total.numpy() / 2, "norm").pvalue > 1e-6


def test_shares_are_independent_of_each_other() -> None:
    shares = torch.stack([share(1.0) for _ in range(6)])
    correlations = torch.corrcoef(shares) - torch.eye(6)
    assert float(correlations.abs().max()) < 6 / math.sqrt(SIZE)


def test_sums_are_exact_in_any_order_and_on_the_grid() -> None:
    random = torch.Generator().manual_seed(1)
    vectors = [torch.randn(50, generator=random) for _ in range(40)]
    noised = torch.stack([noised_share({"w": v}, 0.1, 0.3)["w"] for v in vectors])
    forward, backward = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for one, other in zip(noised, noised.flip(0), strict=True):
        forward, backward = forward + one, backward + other
    assert torch.equal(forward, backward)
    assert torch.equal(on_grid(forward, 0.3), forward)


@pytest.mark.parametrize("length", [0.0, 0.3, 1.0, 5.0, 1e30])
def test_vectors_are_clipped_together(length: float) -> None:
    given = {"a": torch.full((2, 2), length / math.sqrt(8)), "b": torch.full((4,), length / math.sqrt(8))}
    found = noised_share(given, 1.0, 0.0)
    norm = float(torch.cat([v.flatten() for v in found.values()]).norm())
    assert norm <= 1.0 and norm == pytest.approx(min(length, 1.0), rel=1e-5)
    assert found["a"].shape == (2, 2) and found["a"].dtype == torch.float64


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_vectors_without_a_finite_norm_count_as_zero(value: float) -> None:
    given = torch.ones(3, dtype=torch.float64)
    given[1] = value
    assert not noised_share({"w": given}, 1.0, 0.0)["w"].any()


def test_the_grid_does_not_lengthen_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.noise.shares.gaussian", lambda key, size, std, dtype: torch.zeros(size, dtype=dtype))
    for length in (0.5, 3.0):
        given = torch.full((1000,), length / math.sqrt(1000))
        found = noised_share({"w": given}, 1.0, 100.0)["w"]
        assert float(found.norm()) <= min(length, 1.0)
        assert torch.equal(on_grid(found, 100.0), found)
