"""Certified norms are never below the true norm, and not far above it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.lipschitz.convolution import Convolution, ConvolutionRule, WindowGeometry, torus_bound
from clipwise.lipschitz.matrix_norms import frobenius_norms, gram_bounds, measured_together, spectral_bounds
from clipwise.lipschitz.rule import Call, Effort, Rounding


def windows_of(module: Convolution, size: Sequence[int], out: Sequence[int]) -> WindowGeometry:
    shapes = [(module.in_channels, *size)], (module.out_channels, *out)
    return ConvolutionRule(Call("", module, *shapes, Rounding(2.0**-52))).windows


shapes = st.tuples(st.integers(1, 40), st.integers(1, 40))


def exact(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double()).amax())


def drawn(shape: tuple[int, int], seed: int, scale: float, kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if kind == "rank one":
        w = w[:, :1] @ w[:1]
    elif kind == "orthogonal":
        w = torch.linalg.qr(w @ w.T + torch.eye(shape[0], dtype=torch.float64))[0]
    elif kind == "uneven":
        w = w * torch.logspace(0, -12, shape[1], dtype=torch.float64)
    return (w * scale).to(dtype)


@given(
    shape=shapes,
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    kind=st.sampled_from(["any", "rank one", "orthogonal", "uneven"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds_are_never_below_the_svd_nor_far_above(
    shape: tuple[int, int], seed: int, scale: float, kind: str, dtype: torch.dtype
) -> None:
    w = drawn(shape, seed, scale, kind, dtype)
    true = exact(w)
    assert true <= float(spectral_bounds(w)) <= 1.01 * true
    assert true <= float(frobenius_norms(w)) * (1 + 1e-13)
    loose = math.inf
    for iterations in range(8):
        bound = float(gram_bounds(w, iterations))
        assert true * (1 - 1e-15) <= bound <= loose * (1 + 1e-9)  # an upper bound at each iteration, and a tighter one
        loose = bound


def test_the_bound_holds_where_power_iteration_is_too_small() -> None:
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) / math.sqrt(512)
    v = torch.ones(512)
    for _ in range(10):
        v = w.T @ (w @ v)
        v = v / v.norm()
    true = exact(w)
    assert float((w @ v).norm()) < 0.99 * true
    assert true <= float(spectral_bounds(w)) <= 1.01 * true


def test_empty_and_non_finite_matrices() -> None:
    assert float(spectral_bounds(torch.zeros(30, 50))) < 1e-100
    assert spectral_bounds(torch.zeros(3, 0)) == 0
    for bad in (math.inf, math.nan):
        for n in (4, 40):
            w = torch.ones(n, n)
            w[0, 0] = bad
            assert not math.isfinite(float(spectral_bounds(w)))


def test_each_matrix_of_a_stack_gets_a_bound() -> None:
    w = torch.randn(5, 30, 34)
    assert torch.allclose(spectral_bounds(w), torch.stack([spectral_bounds(one) for one in w]))


def operator_bound(module: Convolution, windows: WindowGeometry, effort: Effort = "spectral") -> float:
    """The bound of the convolution rule for these windows."""
    shape, out = (module.in_channels, *windows.size), (module.out_channels, *windows.out)
    rule = ConvolutionRule(Call("", module, [shape], out, Rounding(2.0**-52)))
    wanted = rule.measured(effort)
    return rule.joined(dict(zip(wanted, measured_together(list(wanted.values())), strict=True)))["operator"]


def as_operator(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a linear map, column by column."""
    unit = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return module(unit).flatten(1).T


convolutions = st.fixed_dictionaries(
    {
        "dims": st.sampled_from([1, 2, 2, 3]),
        "size": st.integers(2, 6),
        "kernel": st.integers(1, 4),
        "stride": st.integers(1, 3),
        "padding": st.one_of(st.integers(0, 5), st.just("same")),
        "dilation": st.integers(1, 3),
        "groups": st.sampled_from([1, 2]),
        "seed": st.integers(0, 10**6),
        "positive": st.booleans(),
    }
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(c=convolutions)
def test_operator_bounds_of_convolutions_are_never_below_the_svd(c: dict[str, int]) -> None:
    torch.manual_seed(c["seed"])
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[c["dims"] - 1]
    padding, stride = c["padding"], c["stride"]
    if padding == "same":
        stride = 1
    size = min(c["size"], 3) if c["dims"] == 3 else c["size"]
    module = kind(2, 4, c["kernel"], stride, padding, c["dilation"], groups=c["groups"], bias=False).double()  # type: ignore[arg-type]
    if c["positive"]:
        module.weight.data.abs_()  # the largest gain: nothing cancels
    shape = (2, *[size] * c["dims"])
    try:
        matrix = as_operator(module, shape)
    except RuntimeError:
        return  # the kernel is larger than the image
    out = module(torch.zeros(1, *shape, dtype=torch.float64)).shape[2:]
    windows = windows_of(module, shape[1:], out)
    true = exact(matrix) * (1 - 1e-12)
    for effort in ("frobenius", "spectral", "tight"):
        assert true <= operator_bound(module, windows, effort)  # type: ignore[arg-type]
    assert true <= float(torus_bound(module.weight, c["groups"], windows))


def test_a_torus_of_the_image_itself_would_be_too_small() -> None:
    """Zero padding needs a torus of n + k - 1 pixels: on n pixels the operator differs."""
    module = nn.Conv1d(1, 1, 2, padding=1, bias=False).double()
    module.weight.data = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    assert exact(as_operator(module, (1, 1))) == pytest.approx(math.sqrt(2))  # wrapped onto one pixel the kernel is 0
    assert math.sqrt(2) <= float(torus_bound(module.weight, 1, windows_of(module, (1,), (2,)))) <= 2.001


def test_the_torus_is_tight_for_large_images_and_below_the_count_of_windows() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 5, 3, padding=1, stride=2, bias=False).double()
    windows = windows_of(module, (12, 12), (6, 6))
    true = exact(as_operator(module, (3, 12, 12)))
    bound = operator_bound(module, windows, "tight")
    assert true <= bound <= 1.1 * true
    assert bound < 0.9 * operator_bound(module, windows)


def test_the_papers_recursion_would_miss_the_gain_of_a_constant_kernel() -> None:
    """A 5 x 5 kernel of Frobenius norm 1 has a gain of nearly 5 and not of 1."""
    module = nn.Conv2d(1, 1, 5, padding=2, bias=False).double()
    module.weight.data.fill_(1 / 5)
    windows = windows_of(module, (10, 10), (10, 10))
    true = exact(as_operator(module, (1, 10, 10)))
    assert true > 4
    assert true <= operator_bound(module, windows) <= 5.001
