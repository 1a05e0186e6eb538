"""The methods to write out the gradients of a convolution, and the choice between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.forms import Form, Outer, Windows, Written
from clipwise.gradients.geometry import Geometry
from clipwise.gradients.rules import convolution
from tests.gradients.cases import trainable
from tests.gradients.forms.test_windows import SHAPES, one_by_one, operands


@pytest.mark.parametrize("name", SHAPES)
def test_grouped_convolutions_keep_examples_apart(name: str) -> None:
    x, g, geometry = operands(name)
    found = geometry.weight_gradients(x[1:4], g[1:4])
    assert torch.allclose(found.double(), one_by_one(x, g, geometry)[1:4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name][2] == 1])
def test_products_with_windows_give_the_same(name: str) -> None:
    x, g, geometry = operands(name)
    found = convolution._by_windows(geometry, x[1:4], g[1:4])
    assert torch.allclose(found.double(), one_by_one(x, g, geometry)[1:4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_channels_last_gives_the_same(name: str) -> None:
    x, g, geometry = operands(name)
    truth = one_by_one(x, g, geometry)
    x, g = (t.movedim(2, -1).contiguous().movedim(-1, 2) for t in (x, g))
    found = geometry.weight_gradients(x, g)
    assert torch.allclose(found.double(), truth, rtol=1e-4, atol=1e-4)
    summed = Windows(x, g, geometry).weighted_sum(torch.ones(4).double())
    assert torch.allclose(summed.double(), truth.sum(0), rtol=1e-4, atol=1e-4)


def test_places_are_those_of_torch() -> None:
    for name in SHAPES:
        x, g, geometry = operands(name)
        weight = torch.empty(geometry.weight)
        settings = geometry.stride, geometry.padding, geometry.dilation, False, [0], geometry.groups
        out = torch.ops.aten.convolution(x.flatten(0, 1), weight, None, *settings)
        assert out.shape == g.flatten(0, 1).shape


def _form(c: int, p: int, size: int, kernel: int, groups: int = 1) -> Form:
    geometry = Geometry(torch.Size((p, c // groups, kernel, kernel)), (1, 1), (kernel // 2,) * 2, (1, 1), groups)
    return convolution._form(torch.zeros(2, 1, c, size, size), torch.zeros(2, 1, p, size, size), geometry)


def test_early_layers_are_written_late_ones_are_windows_and_size_1_is_a_product() -> None:
    assert isinstance(_form(3, 64, 32, 3), Written)
    assert isinstance(_form(64, 64, 32, 3), Written)
    assert isinstance(_form(512, 512, 4, 3), Windows)
    assert isinstance(_form(512, 512, 4, 3, groups=2), Windows)
    assert isinstance(_form(64, 64, 4, 3, groups=64), Written)  # each channel is its own group
    assert isinstance(_form(64, 64, 32, 1), Outer)


class OneStride(nn.Module):
    """A direct call with one number for both axes."""

    def __init__(self, channels: int, kernels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kernels, channels, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.convolution(x, self.weight, None, [2], [1], [1], False, [0], 1)
        return out


@pytest.mark.parametrize("channels", [2, 40])
def test_one_number_for_all_axes(channels: int) -> None:
    torch.manual_seed(0)
    model, x = OneStride(channels, 30), torch.randn(3, channels, 5, 5)
    found = per_example_gradients(model(x).square().sum((1, 2, 3)), trainable(model), Memory())
    ours = found.instantiate(slice(0, 3))["weight"]
    for i in range(3):
        (truth,) = torch.autograd.grad(model(x[i : i + 1]).square().sum(), [model.weight])
        assert torch.allclose(ours[i], truth, rtol=1e-4, atol=1e-3)
