"""Rules compared with the true operations: slopes on a grid, pools as matrices, groups of channels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz import bounds_of, trace
from clipwise.lipschitz.activations import MODULES, constants_of

SETTINGS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in MODULES},
    "LeakyReLU(-2)": lambda: nn.LeakyReLU(-2.0),
    "ELU(1.7)": lambda: nn.ELU(1.7),
    "ELU(-1.5)": lambda: nn.ELU(-1.5),
    "GELU(tanh)": lambda: nn.GELU(approximate="tanh"),
    "Softplus(0.2)": lambda: nn.Softplus(beta=0.2),
    "Softplus(-1.5)": lambda: nn.Softplus(beta=-1.5),
    "Hardtanh(1, 3)": lambda: nn.Hardtanh(1.0, 3.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_constants_of_an_activation_hold_and_its_slope_is_reached(name: str) -> None:
    module = SETTINGS[name]()
    slope, at_zero, most = constants_of(module)
    x = torch.linspace(-60, 60, 240_001, dtype=torch.float64, requires_grad=True)
    y = module(x)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    assert float(slopes.abs().max()) <= slope * (1 + 1e-12)
    assert float(slopes.abs().max()) >= slope * (1 - 1e-4)
    assert abs(float(module(torch.zeros(1, dtype=torch.float64)))) <= at_zero + 1e-15
    assert float(y.detach().abs().max()) <= most
    assert bool((y.detach().abs() <= slope * x.detach().abs() + at_zero + 1e-12).all())


POOLS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.AvgPool1d(2),
    "overlapping": lambda: nn.AvgPool1d(3, 1),
    "padded": lambda: nn.AvgPool1d(3, 2, 1),
    "padding not counted": lambda: nn.AvgPool1d(3, 2, 1, count_include_pad=False),
    "rounded up": lambda: nn.AvgPool1d(3, 2, 0, ceil_mode=True),
    "all of it": lambda: nn.AvgPool1d(4, 3, 2, ceil_mode=True, count_include_pad=False),
    "adaptive": lambda: nn.AdaptiveAvgPool1d(3),
}


@pytest.mark.parametrize("name", POOLS)
def test_an_average_pool_has_the_norm_of_its_matrix(name: str) -> None:
    size = 8
    pool = POOLS[name]()
    matrix = pool(torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1)
    network = trace(nn.Sequential(ClipInput(1.0), pool), (1, size))
    gain = bounds_of(network, 1.0).gradients[network.operations[0].name]
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm <= gain <= norm * (1 + 1e-4)


def test_all_groups_of_a_convolution_may_be_at_their_limit_at_once() -> None:
    """Four channels of ones, each with its own filter: the output is as long as the input."""
    conv = nn.Conv1d(4, 4, 1, groups=4, bias=False)
    nn.init.ones_(conv.weight)
    network = trace(nn.Sequential(ClipInput(100.0), nn.Hardtanh(), conv), (4, 5))
    assert math.sqrt(20) <= bounds_of(network, 1.0).norms[network.output] <= math.sqrt(20) * (1 + 1e-4)


def test_dropout_makes_what_it_keeps_larger() -> None:
    network = trace(nn.Sequential(ClipInput(1.0), nn.Dropout(0.75)), (3,))
    bounds = bounds_of(network, 1.0)
    assert 4 <= bounds.gradients[network.operations[0].name] <= 4 * (1 + 1e-4)
    assert 4 <= bounds.norms[network.output] <= 4 * (1 + 1e-4)
