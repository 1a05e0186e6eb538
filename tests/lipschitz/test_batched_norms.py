"""Norms measured together are never below the SVD, for every method."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.layers import ClipInput
from clipwise.lipschitz import limits_of, matrix_norms, trace
from clipwise.lipschitz.bounds import measured_norms
from clipwise.lipschitz.matrix_norms import Spectral, largest_frobenius, length, longest_row, measured_together
from clipwise.lipschitz.weights import clip_and_measure_

KINDS = ("any", "rank one", "flat", "uneven", "zero")
shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.sampled_from(KINDS))


def drawn(shape: tuple[int, int, int, str], seed: int, scale: float) -> Tensor:
    g, m, n, kind = shape
    w = torch.randn(g, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "rank one":
        w = w[:, :, :1] @ w[:, :1]
    elif kind == "flat":
        w = torch.linalg.qr(w)[0] if m >= n else torch.linalg.qr(w.mT)[0].mT
    elif kind == "uneven":
        w = w * torch.logspace(0, -12, n, dtype=torch.float64)
    return w * (0.0 if kind == "zero" else scale)


def exact(w: Tensor) -> float:
    return float(torch.linalg.svdvals(w).amax())


@pytest.fixture(params=["eigenvalues", "iterated together"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the accelerator's method, padded matrices in one iteration, on a CPU too."""
    if request.param == "iterated together":
        monkeypatch.setattr(Spectral, "is_quick", False)
        monkeypatch.setattr(matrix_norms, "_filled_side", lambda gram: 48)
    return str(request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=st.lists(shapes, min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)
def test_norms_are_never_below_the_svd_nor_far_above(
    method: str, some: list[tuple[int, int, int, str]], seed: int, scale: float
) -> None:
    matrices = [drawn(shape, seed + i, scale) for i, shape in enumerate(some)]
    for w, found in zip(matrices, measured_together([Spectral(w) for w in matrices]), strict=True):
        true = exact(w)
        assert true <= found <= (1.0001 if method == "eigenvalues" else 1.02) * true + 1e-140


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, seed=st.integers(0, 10**6), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_one_gram_matrix_gives_three_norms(
    method: str, shape: tuple[int, int, int, str], seed: int, scale: float
) -> None:
    w = drawn(shape, seed, scale)
    spectral = Spectral(w)
    wanted = [largest_frobenius(spectral)]
    true = [torch.linalg.vector_norm(w, dim=(1, 2)).amax()]
    if w.shape[1] <= w.shape[2]:
        wanted.append(longest_row(spectral))
        true.append(torch.linalg.vector_norm(w, dim=2).amax())
    for found, one in zip(measured_together([spectral, *wanted])[1:], true, strict=True):
        assert one * (1 - 1e-15) <= found <= one * (1 + 1e-10) + 1e-140


def test_a_tall_matrix_has_no_row_norms_on_the_diagonal() -> None:
    with pytest.raises(AssertionError):
        longest_row(Spectral(torch.ones(1, 3, 2).double()))


def test_results_keep_their_order(method: str) -> None:
    w = torch.randn(1, 5, 7, dtype=torch.float64)
    whole = length(torch.linalg.vector_norm(w), 35)
    empty = torch.zeros(1, 0, 3, dtype=torch.float64)
    found = measured_together([torch.tensor(3.0).double(), Spectral(w), whole, Spectral(empty), Spectral(2 * w)])
    assert found[0] == 3.0 and found[3] == 0.0
    assert found[1] < found[2] and found[4] == pytest.approx(2 * found[1], rel=1e-6)
    assert measured_together([Spectral(w)]) == [found[1]] and measured_together([]) == []


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_matrix_has_no_finite_norm_and_affects_no_other(method: str, bad: float) -> None:
    good, spoiled = torch.randn(1, 6, 6).double(), torch.randn(1, 5, 5).double()
    spoiled[0, 2, 3] = bad
    of = Spectral(spoiled)
    first, second, *others = measured_together([Spectral(good), of, largest_frobenius(of), longest_row(of)])
    assert not any(map(math.isfinite, others))
    assert exact(good) <= first <= 1.02 * exact(good) and not math.isfinite(second)


def test_norms_hold_under_adversarial_updates(method: str) -> None:
    """Ascent on the norm itself, and large noise: the certified norm is never below the true one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        ClipInput(1.0), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 3)
    )
    network = trace(model, (1, 4, 4))
    limits = limits_of(network, 1.5)
    for step in range(30):
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1 and step % 3:
                    u, _, v = torch.linalg.svd(p.flatten(1), full_matrices=False)
                    p.add_(0.5 * torch.outer(u[:, 0], v[0]).view_as(p))
                else:
                    p.add_(torch.randn_like(p) * 10.0 ** (step % 4 - 2))
        kept, _ = clip_and_measure_(network, limits, "spectral", "spectral")
        for op in network.operations:
            weight = next((p for own, p in model.named_parameters() if own == op.parameters.get("weight")), None)
            if weight is not None:
                true = exact(weight.detach().double().flatten(1))
                assert true <= kept[op.name]["weight"] and true <= 1.5
        again = measured_norms(network, "spectral")
        assert all(again[op][k] <= kept[op][k] * (1 + 1e-2) for op in kept for k in kept[op])
