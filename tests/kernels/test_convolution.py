"""The convolution kernel in Triton's interpreter, against its eager twin in float64.

Run with TRITON_INTERPRET=1 if there is no GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipwise import kernels
from clipwise.gradients.geometry import Geometry
from clipwise.kernels import convolution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not kernels.usable(torch.empty(0, device=DEVICE)), reason="needs a GPU, or TRITON_INTERPRET=1"
)

# (C, P, H, W, rows, kernel, stride, padding, dilation)
SHAPES = {
    "stem": (3, 20, 9, 9, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    "stem of stride 2": (3, 16, 11, 9, 1, (7, 7), (2, 2), (3, 3), (1, 1)),
    "one channel": (1, 5, 8, 7, 1, (5, 5), (1, 1), (0, 0), (1, 1)),
    "many columns": (17, 18, 5, 5, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    "rows of a fold": (4, 6, 5, 6, 3, (3, 2), (2, 1), (1, 0), (1, 2)),
    "wide padding": (2, 3, 3, 3, 1, (3, 3), (1, 1), (4, 4), (1, 1)),
    "kernel of size 1": (5, 6, 7, 7, 1, (1, 1), (2, 2), (0, 0), (1, 1)),
    "one position": (6, 7, 3, 3, 1, (3, 3), (1, 1), (0, 0), (1, 1)),
}


def operands(name: str, B: int = 2) -> tuple[Tensor, Tensor, Geometry]:
    torch.manual_seed(0)
    C, P, H, W, rows, kernel, stride, padding, dilation = SHAPES[name]
    geometry = Geometry(torch.Size((P, C, *kernel)), stride, padding, dilation)
    h, w = (geometry.places(axis, size) for axis, size in enumerate((H, W)))
    image = torch.randn(B, rows, C, H, W, device=DEVICE)
    return image, torch.randn(B, rows, P, h, w, device=DEVICE), geometry


def by_kernel(image: Tensor, g: Tensor, at: Geometry, *, tf32: bool = False) -> Tensor:
    assert convolution.fits(image, g)
    return convolution.weight_gradients(image, g, at.kernel, at.stride, at.padding, at.dilation, tf32=tf32)


def channels_last(t_BrCHW: Tensor) -> Tensor:
    return t_BrCHW.movedim(2, -1).contiguous().movedim(-1, 2)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("last", [False, True], ids=["pixels in a row", "channels last"])
def test_it_equals_its_twin(name: str, last: bool) -> None:
    image, g, geometry = operands(name)
    truth = geometry.weight_gradients(image.double(), g.double())
    if last:
        image, g = channels_last(image), channels_last(g)
    found = by_kernel(image, g, geometry)
    assert found.shape == truth.shape
    # Each entry is a sum of `positions` products of numbers around 1.
    positions = g.shape[1] * g.shape[3:].numel()
    assert (found - truth).abs().max() <= 1e-6 * max(16, positions)


def test_any_strides() -> None:
    """The row axis before the examples in memory, and every second pixel of a larger image."""
    image, g, geometry = operands("rows of a fold")
    truth = by_kernel(image, g, geometry)
    outside = image.transpose(0, 1).contiguous().transpose(0, 1)
    larger = torch.full((*image.shape[:4], 2 * image.shape[4]), torch.nan, device=DEVICE)
    larger[..., ::2] = image
    assert torch.equal(by_kernel(outside, g, geometry), truth)
    assert torch.equal(by_kernel(larger[..., ::2], g, geometry), truth)


def test_what_surrounds_an_image_is_not_read() -> None:
    """Neighbours in memory are not finite: a load outside of the image would show."""
    image, g, geometry = operands("wide padding", B=3)
    image[0] = image[2] = torch.nan
    g[0] = g[2] = torch.inf
    alone = by_kernel(image[1:2].clone(), g[1:2].clone(), geometry)
    assert torch.isfinite(alone).all()
    assert torch.equal(by_kernel(image, g, geometry)[1:2], alone)


def test_unsupported_operands_do_not_fit() -> None:
    image, g, _ = operands("stem")
    assert not convolution.fits(image.double(), g.double())
    assert not convolution.fits(image[..., 0], g[..., 0])
