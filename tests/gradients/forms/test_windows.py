"""Gradients as sums over windows: norms, sums and bounds against written-out float64 gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipwise.gradients.forms import Budget, windows
from clipwise.gradients.forms.windows import Windows, window_products, windows_pay
from clipwise.gradients.geometry import Geometry

SLACK = 1 + 1e-5
PLENTY = 2**40

# (c of a group, p of a group, groups, rows, pixels, kernel, stride, padding, dilation)
SHAPES = {
    "same size": (5, 7, 1, 1, (4, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "stride": (5, 7, 1, 1, (7, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    "stride beyond the kernel": (3, 4, 1, 1, (9, 8), (2, 1), (3, 2), (0, 0), (1, 1)),
    "stride, dilation, no symmetry": (3, 4, 1, 1, (9, 7), (3, 2), (2, 3), (2, 1), (3, 2)),
    "wide padding": (3, 4, 1, 1, (2, 2), (3, 3), (1, 1), (4, 3), (1, 1)),
    "groups": (3, 2, 4, 1, (5, 4), (3, 3), (1, 2), (1, 0), (1, 1)),
    "fold": (4, 3, 1, 3, (4, 4), (3, 3), (2, 1), (1, 1), (1, 1)),
    "fold and groups": (2, 3, 2, 2, (4, 3), (2, 2), (1, 1), (1, 0), (1, 1)),
    "one axis": (4, 6, 1, 1, (9,), (4,), (2,), (2,), (2,)),
    "three axes": (2, 3, 1, 1, (3, 4, 3), (2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 1)),
    "one position": (6, 5, 1, 1, (3, 3), (3, 3), (1, 1), (0, 0), (1, 1)),
    "kernel of size 1": (6, 5, 1, 1, (5, 5), (1, 1), (2, 2), (0, 0), (1, 1)),
}


def operands(name: str, B: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Geometry]:
    torch.manual_seed(0)
    c, p, groups, rows, pixels, kernel, stride, padding, dilation = SHAPES[name]
    geometry = Geometry(torch.Size((groups * p, c, *kernel)), stride, padding, dilation, groups)
    places = [geometry.places(axis, size) for axis, size in enumerate(pixels)]
    x = torch.randn(B, rows, groups * c, *pixels, dtype=dtype)
    return x, torch.randn(B, rows, groups * p, *places, dtype=dtype), geometry


def one_by_one(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Each example's gradient separately, in float64."""
    pairs = zip(x.double(), g.double(), strict=True)
    return torch.stack([geometry.weight_gradient(x_k, g_k) for x_k, g_k in pairs])


def bounds(form: Windows, budget: int = PLENTY) -> Tensor:
    square_B = form.squared_norms(Budget(budget))
    form.tighten(square_B, Budget(budget))
    return square_B.sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_norms_sums_and_gradients(name: str, dtype: torch.dtype) -> None:
    x, g, geometry = operands(name, dtype=dtype)
    form, truth = Windows(x, g, geometry), one_by_one(x, g, geometry)
    true_norms = truth.flatten(1).norm(dim=1)
    norms = bounds(form)
    assert (norms >= true_norms).all() and (norms <= true_norms * SLACK).all()
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    w_B = torch.rand(len(x), dtype=torch.float64)
    assert torch.allclose(form.weighted_sum(w_B).double(), torch.einsum("b,b...->...", w_B, truth), **close)
    assert torch.allclose(form.instantiate(slice(1, 3)).double(), truth[1:3], **close)


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_windows(name: str) -> None:
    x, _, geometry = operands(name, dtype=torch.float64)
    if geometry.groups > 1:
        x = x[:, :, : geometry.weight[1]]
    copied_BTn = geometry.windows(x)
    expected = copied_BTn @ copied_BTn.mT
    assert torch.allclose(window_products(x.transpose(1, 2), geometry), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fold and groups", "stride"])
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, geometry = operands(name)
    whole = bounds(Windows(x, g, geometry))
    monkeypatch.setattr(windows, "_CACHED_BYTES", 1)
    form = Windows(x, g, geometry)
    assert len(windows._chunks(x, g, geometry)) == len(x)
    assert torch.allclose(bounds(form), whole, rtol=1e-12)


def cancelling(scale: float, remainder: float) -> tuple[Tensor, Tensor, Geometry]:
    """Constant images, and output gradients that nearly cancel over positions."""
    torch.manual_seed(0)
    geometry = Geometry(torch.Size((16, 12, 3, 3)), (1, 1), (0, 0), (1, 1))
    x = torch.randn(3, 1, 12, 1, 1).expand(3, 1, 12, 6, 6).contiguous()
    signs = 1 - 2.0 * (torch.arange(16) % 2).view(4, 4)
    g = torch.randn(3, 1, 16, 1, 1) * signs * (1 + remainder * torch.randn(3, 1, 16, 4, 4))
    g[2], x[2] = torch.randn(1, 16, 4, 4), torch.randn(1, 12, 6, 6)  # with an ordinary example
    return x, g * scale, geometry


@pytest.mark.parametrize("budget", [0, PLENTY], ids=["made again", "kept"])
@pytest.mark.parametrize("remainder", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e15])
def test_the_released_gradient_is_at_most_its_norm_bound(scale: float, remainder: float, budget: int) -> None:
    x, g, geometry = cancelling(scale, remainder)
    form = Windows(x, g, geometry)
    norms = bounds(form, budget)
    for i in range(len(x)):
        alone = torch.nn.functional.one_hot(torch.tensor(i), len(x)).double()
        assert form.weighted_sum(alone).double().norm() <= norms[i] * SLACK + 1e-37
    assert form.weighted_sum((1 / norms).clamp(max=1)).double().norm() <= len(x) * SLACK
    truth = one_by_one(x, g, geometry).flatten(1).norm(dim=1)
    mass = torch.tensor([form.mass(i) for i in range(len(x))])
    assert (norms >= truth).all() and (norms <= truth * SLACK + 1e-12 * mass.double() + 1e-12).all()


def test_an_example_that_cancels_is_summed_separately() -> None:
    x, g, geometry = cancelling(1e5, 1e-6)
    form = Windows(x, g, geometry)
    bounds(form)
    assert set(form._exact) == {0, 1}


def test_the_rounding_bound_covers_the_norm_of_windows_that_cancel() -> None:
    """Without tightening, n + c u M is at least the true norm, however much cancels."""
    for remainder in (0.0, 1e-9, 1e-6, 1e-3):
        x, g, geometry = cancelling(1.0, remainder)
        norms = Windows(x, g, geometry).squared_norms(Budget(0)).sqrt()
        assert (norms >= one_by_one(x, g, geometry).flatten(1).norm(dim=1)).all()


def test_many_terms_that_are_all_alike_are_summed_well() -> None:
    """Each addition of one long float32 sum of these would err in the same direction."""
    geometry = Geometry(torch.Size((24, 16, 3, 3)), (1, 1), (1, 1), (1, 1))
    x, g = torch.full((128, 1, 16, 8, 8), 0.1), torch.full((128, 1, 24, 8, 8), 0.3)
    form, w_B = Windows(x, g, geometry), torch.ones(128, dtype=torch.float64)
    truth = one_by_one(x, g, geometry).sum(0)
    assert (form.weighted_sum(w_B).double() - truth).norm() <= 1e-5 * truth.norm()


def test_muted_examples_add_nothing() -> None:
    x, g, geometry = cancelling(1.0, 1e-6)
    x[0, 0, 0, 2, 2], g[1, 0, 3, 1, 1] = torch.nan, torch.inf
    form = Windows(x, g, geometry)
    norms = bounds(form)
    assert not torch.isfinite(norms[:2]).any() and torch.isfinite(norms[2])
    form.mute(torch.tensor([True, True, False]))
    truth = one_by_one(x[2:], g[2:], geometry)[0]
    assert torch.allclose(form.weighted_sum(torch.ones(3).double()).double(), truth, atol=1e-4)


def test_an_example_summed_separately_is_muted_too() -> None:
    x, g, geometry = cancelling(1e5, 1e-6)
    form = Windows(x, g, geometry)
    bounds(form)
    form.mute(torch.tensor([True, True, True]))
    assert not form.weighted_sum(torch.ones(3).double()).any()


@pytest.mark.parametrize(
    ("c", "p", "size", "kernel", "pays"),
    [(512, 512, 4, 3, True), (256, 256, 8, 3, True), (64, 64, 32, 3, False), (3, 64, 32, 7, False)],
)
def test_few_positions_and_many_channels_pay(c: int, p: int, size: int, kernel: int, pays: bool) -> None:
    """The two ends of a network; layers in between depend on the constants."""
    geometry = Geometry(torch.Size((p, c, kernel, kernel)), (1, 1), (kernel // 2,) * 2, (1, 1))
    x, g = torch.empty(1, 1, c, size, size), torch.empty(1, 1, p, size, size)
    assert windows_pay(x, g, geometry) == pays
