"""Clipped maps by kernels, compared with torch's operations in float64.

Kernels run where Triton works, also in its interpreter (TRITON_INTERPRET=1), and otherwise their torch twins.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from clipwise import kernels
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import fits
from tests.kernels import conftest as _interpreter  # noqa: F401 (lets the interpreter count loops)
from tests.layers.clipped.cases import CASES, Case, bounds, clipped, inputs

NAMES = ["linear", "linear without bias", "linear over positions", "linear over a grid", "conv1d", "conv2d",
         "conv3d", "padding", "same padding, even kernel", "stride", "dilation", "groups", "depthwise", "circular",
         "replicate", "layer norm over positions", "group norm"]  # fmt: skip
WAYS = [(mode, bound) for mode in ("clip", "normalize") for bound in ("upstream", "gradient")]
every_name = pytest.mark.parametrize("name", NAMES)
# With C1 = 1 weights and bias have the same bound but different norms.
CONSTANTS = [{"input_norm": 1.5, "grad_norm": 0.7}, {"input_norm": 1.0, "grad_norm": 0.7}]
every_way = pytest.mark.parametrize(("mode", "bound"), WAYS)
every_constant = pytest.mark.parametrize("constants", CONSTANTS, ids=str)


@pytest.fixture(autouse=True)
def _by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel path everywhere; each kernel checks for Triton."""
    monkeypatch.setattr(kernels, "usable", lambda t: True)


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Of the parameters, and of the input."""
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(model(x), [*model.parameters(), x], g))


def pair(case: Case, **options: object) -> tuple[nn.Module, nn.Module]:
    """In float32, which kernels support, and in float64, which they do not."""
    exact = clipped(case, **options)
    return copy.deepcopy(exact).float(), exact


def upstream(model: nn.Module, x: Tensor, scale: float = 3.0) -> Tensor:
    with torch.no_grad():
        shape = model(x).shape
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def require_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5)


@every_name
@every_way
@every_constant
def test_the_same_sums(name: str, mode: str, bound: str, constants: dict[str, float]) -> None:
    case = CASES[name]
    ours, exact = pair(case, mode=mode, bound=bound, **constants)
    x = inputs(case, scale=1.0)
    x[0] *= 0.01  # is not clipped
    g = upstream(exact, x)
    assert fits(x.float()) and not fits(x)
    require_close([ours(x.float())], [exact(x)])
    require_close(gradients(ours, x.float(), g.float()), gradients(exact, x, g))


@every_name
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_example_counts_as_zero(name: str, where: str, value: float) -> None:
    case = CASES[name]
    for mode, bound in (WAYS[0], WAYS[3]):
        ours, exact = pair(case, mode=mode, bound=bound)
        x = inputs(case)
        g = upstream(exact, x)
        (x if where == "input" else g)[1].view(-1)[0] = value
        found, expected = gradients(ours, x.float(), g.float()), gradients(exact, x, g)
        require_close(found[:-1], expected[:-1])
        require_close([found[-1][[0, 2, 3]]], [expected[-1][[0, 2, 3]]])


@pytest.mark.parametrize("name", ["conv2d", "same padding, even kernel", "groups"])
@every_way
def test_layouts(name: str, mode: str, bound: str) -> None:
    """Channels-last images, and every second image of a batch."""
    case = CASES[name]
    ours, exact = pair(case, mode=mode, bound=bound)
    x = inputs(case)
    g = upstream(exact, x)
    expected = gradients(exact, x, g)
    for form in (torch.channels_last, torch.contiguous_format):
        there = copy.deepcopy(ours).to(memory_format=form)  # type: ignore[call-overload]
        laid = x.float().contiguous(memory_format=form)
        require_close(gradients(there, laid, g.float().contiguous(memory_format=form)), expected)
        doubled = laid.repeat_interleave(2, 0)[::2], g.float().repeat_interleave(2, 0)[::2]
        require_close(gradients(there, *doubled), expected)
    transposed = x.float().mT.contiguous().mT, g.float().mT.contiguous().mT
    require_close(gradients(ours, *transposed), expected)


@pytest.mark.parametrize("name", ["linear over positions", "same padding, even kernel", "conv2d"])
@every_way
def test_nothing_is_cleared_where_factors_are_recorded(name: str, mode: str, bound: str) -> None:
    case = CASES[name]
    ours, exact = pair(case, mode=mode, bound=bound)
    x = inputs(case)
    g = upstream(exact, x)
    with switch.noting() as factors:
        found = gradients(ours, x.float(), g.float())
    assert factors and bool((torch.cat(factors) > 0).all())
    require_close(found, gradients(exact, x, g))
    x[1].view(-1)[0] = math.nan
    with switch.noting() as factors:
        gradients(ours, x.float(), g.float())
    assert bool((torch.cat(factors) == 0).any())


@pytest.mark.parametrize("name", [*NAMES, "attention"])
@every_way
@every_constant
def test_no_example_adds_more_than_its_bound(name: str, mode: str, bound: str, constants: dict[str, float]) -> None:
    case = CASES[name]
    ours, _ = pair(case, mode=mode, bound=bound, **constants)
    for scale in (1e-3, 1.0, 1e4):
        x = inputs(case, 1, scale).float()
        g = upstream(ours, x, 1e3).float()
        for (parameter, most), gradient in zip(bounds(ours).items(), gradients(ours, x, g)[:-1], strict=True):
            assert float(gradient.double().norm()) <= most, parameter


@every_way
def test_half_precision_sums_use_the_dtype_of_the_weights(mode: str, bound: str) -> None:
    """As under autocast: input and gradient are bfloat16."""
    case = CASES["linear over positions"]
    ours, _ = pair(case, mode=mode, bound=bound)
    x = inputs(case).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    for (parameter, most), gradient in zip(
        bounds(ours).items(), torch.autograd.grad(y, list(ours.parameters()), 1e3 * y), strict=True
    ):
        assert gradient.dtype == torch.float32 and 0 < float(gradient.norm()) <= most * len(x), parameter


@every_name
def test_a_batch_may_be_empty(name: str) -> None:
    case = CASES[name]
    ours, _ = pair(case)
    x = inputs(case, 0).float()
    assert ours(x).shape == (0, *ours(inputs(case).float()).shape[1:])


@pytest.mark.parametrize("by_passes", [True, False])
@pytest.mark.parametrize("name", ["linear", "linear over positions", "conv2d", "groups", "rnn", "gru"])
def test_a_long_gradient_with_a_tiny_input_stays_within_its_bound(
    name: str, by_passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1 C2 / n times g must not overflow float32: n may be small where g is not."""
    monkeypatch.setattr(kernels, "usable", lambda t: by_passes)
    case = CASES[name]
    ours, _ = pair(case, mode="normalize", bound="gradient", grad_norm=1e4)
    if name in ("rnn", "gru"):
        for p in ours.parameters():  # or biases keep its states away from 0
            p.data.mul_(0 if p.dim() == 1 else 1)
    for size, length in ((1e-20, 1e18), (1e-34, 1e10), (1e-40, 1e30), (0.0, 1e38)):
        x = inputs(case, 1, size).float()
        x[0, ..., -1:] = 0  # a blank place, or a blank feature
        g = (upstream(ours, x, 1.0) * length).float()
        for (parameter, most), gradient in zip(bounds(ours).items(), gradients(ours, x, g)[:-1], strict=True):
            assert float(gradient.double().norm()) <= most, (parameter, size, length)
