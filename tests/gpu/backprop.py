"""Clipped layers on a GPU, against float64 on a CPU: `python -m tests.gpu.backprop [--device cuda]`.

Compares the kernels with their twins. Checks sums of a batch; the largest contribution of one example (in IEEE
arithmetic and in TF32); layouts, non-finite examples and empty batches; large gradients where images are blank; and
that a step of a small network does not make the host wait. Exit code 1 if a check fails. `--device cpu` is a rehearsal.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from clipwise.gradients.precision import IEEE, TF32, Arithmetic
from clipwise.kernels import measures, scaled, tangent, weighted
from clipwise.kernels.factors import (
    Norms,
    gradient_factors,
    gradient_factors_in_torch,
    input_factors,
    input_factors_in_torch,
)
from clipwise.layers import clip_inputs
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import LIMITS
from tests.gpu.verdicts import Verdicts, failures_of
from tests.layers.clipped.cases import CASES, bounds, clipped, inputs

WAYS = [(mode, bound) for mode in ("clip", "normalize") for bound in ("upstream", "gradient")]
CLOSE = {"ieee": 1e-3, "tf32": 5e-2}


def sums(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x), list(model.parameters()), g))


def at_the_device(device: torch.device, arithmetic: Arithmetic) -> Verdicts:
    """Every layer and mode: the same sums as in float64, within their bounds."""
    for name, case in CASES.items():
        # With C1 = 1 the bounds of weights and bias are equal, and their norms are not.
        for (mode, bound), (input_norm, scale) in itertools.product(WAYS, ((1.5, 3.0), (1.0, 0.05))):
            model = clipped(case, mode=mode, bound=bound, input_norm=input_norm)
            there = copy.deepcopy(model).float().to(device)
            x = inputs(case, scale=scale)
            with torch.no_grad():
                y = model(x)
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            moved = (x if case.ids else x.float()).to(device), g.float().to(device)
            with arithmetic.products():
                found = sums(there, *moved)
            for a, b, parameter in zip(found, sums(model, x, g), bounds(model), strict=True):
                error = float((a.cpu().double() - b).norm()) / bounds(model)[parameter]
                yield (
                    f"{name}, {mode}, {bound}, {arithmetic.name}: {parameter} off by {error:.1e}",
                    error < CLOSE[arithmetic.name],
                )
            one = moved[0].narrow(case.axis, 0, 1), moved[1][:1] * 1e4
            with arithmetic.products():
                alone = sums(there, *one)
            for a, (parameter, most) in zip(alone, bounds(model).items(), strict=True):
                length = float(a.double().norm())
                yield (
                    f"{name}, {mode}, {bound}, {arithmetic.name}: {parameter} {length / most:.6f}",
                    length <= most * (1 + arithmetic.slack),
                )


SHAPES = [(3, 5, 7), (2, 70, 3), (64, 33, 1), (1, 3, 3000), (300, 1, 130), (5, 4, 64), (2, 32, 70_000), (9, 1024, 1)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t.contiguous(),
    "channels last": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: t.repeat_interleave(2, 2)[..., ::2],
}


def kernels_and_twins(device: torch.device) -> Verdicts:
    """Every kernel equals its twin in float64 on a CPU."""
    for shape in SHAPES:
        for layout, lay in LAYOUTS.items():
            for what, found, expected in _of_kernels(shape, lay, device):
                error = float((found.cpu().double() - expected).norm() / (expected.norm() + 1e-30))
                yield f"{what}, {shape}, {layout}: off by {error:.1e}", error < 1e-4


def _of_kernels(
    shape: tuple[int, ...], lay: Callable[[Tensor], Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    B, K, R = shape
    exact = torch.randn(shape, generator=random).double()
    other = torch.randn(shape, generator=random).double()
    windows = torch.rand(B, 1, R, generator=random).double()
    factor = torch.linspace(0, 1, B).double()
    bias = torch.randn(K, generator=random).double()
    there = lay(exact.float().to(device))
    factor_there = factor.to(device)

    def put(t: Tensor) -> Tensor:
        return t.float().to(device)

    found = measures.measures(there, put(windows), total=True, mass=True, square=True)
    twins = measures.measures_in_torch(exact, windows, total=True, mass=True, square=True)
    for name, a, b in zip(found._fields, found, twins, strict=True):
        assert a is not None and b is not None
        yield f"measures, {name}", a, b
    for name, norms, own in (
        ("first", Norms(found.total), Norms(twins.total)),
        ("smaller", Norms(found.mass, found.square, True, 2.0, 3.0), Norms(twins.mass, twins.square, True, 2.0, 3.0)),
        ("larger", Norms(found.total, found.mass, second_times=0.1, takes_larger=True),
         Norms(twins.total, twins.mass, second_times=0.1, takes_larger=True)),
        ("times", Norms(found.weighted, times=factor_there), Norms(twins.weighted, times=factor)),
    ):  # fmt: skip
        for most in (1.0, 1e4):
            a = gradient_factors(norms, 0.7, most, LIMITS)
            yield f"factors, {name}", a, gradient_factors_in_torch(own, 0.7, most, LIMITS)
    square = exact.square().sum((1, 2))
    of_input = input_factors(square.to(device), 3.0, LIMITS)
    for name, a, b in zip(("norm", "scale"), of_input, input_factors_in_torch(square, 3.0, LIMITS), strict=True):
        yield f"factors, {name}", a, b
    rows = there.clone()
    rows[factor_there == 0] = math.nan
    yield "scaled", scaled.scaled(rows, factor_there, put(bias)), scaled.scaled_in_torch(exact, factor, bias)
    yield ("scaled in place", scaled.scaled(rows, factor_there, out=rows), scaled.scaled_in_torch(exact, factor))
    norm, nu = square.sqrt(), factor + 0.5
    dx = put(other)
    tangent.to_tangent_(dx, there, norm.to(device), factor_there, nu.to(device))
    yield "tangent", dx, tangent.to_tangent_in_torch_(other.clone(), exact, norm, factor, nu)
    a, b = (weighted.weighted_sum(there[..., 0], factor_there), weighted.weighted_sum_in_torch(exact[..., 0], factor))
    yield "weighted", a, b


MAPS = ["linear", "linear over positions", "conv1d", "conv2d", "conv3d", "padding", "same padding, even kernel",
        "groups", "circular"]  # fmt: skip


def layouts_and_what_is_not_finite(device: torch.device) -> Verdicts:
    """Sums over the other examples, and their input gradients, for any layout and any non-finite example."""
    for name in MAPS:
        for mode, bound in WAYS:
            for where in ("nowhere", "input", "gradient"):
                yield from _not_finite(name, mode, bound, where, device)


def _not_finite(name: str, mode: str, bound: str, where: str, device: torch.device) -> Verdicts:
    case = CASES[name]
    model = clipped(case, mode=mode, bound=bound)
    there = copy.deepcopy(model).float().to(device)
    x = inputs(case)
    with torch.no_grad():
        g = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if where != "nowhere":
        (x if where == "input" else g)[1].view(-1)[0] = math.nan
    expected = _with_input(model, x, g)
    for layout in ("rows", "channels last", "every second example"):
        moved = [_laid(t.float().to(device), layout) for t in (x, g)]
        found = _with_input(there, *moved)
        errors = [
            float((a.cpu().double() - b).norm() / (b.norm() + 1e-6)) for a, b in zip(found, expected, strict=True)
        ]
        what = f"{name}, {mode}, {bound}, {layout}, not finite {where}: off by {max(errors):.1e}"
        yield what, all(e < 1e-3 for e in errors)  # false for NaN
    with switch.noting() as factors:
        _with_input(there, x.float().to(device), g.float().to(device))
    is_noted = bool((torch.cat(factors) == 0).any())
    yield f"{name}, {mode}, {bound}: not finite {where}, noted {is_noted}", is_noted == (where != "nowhere")
    empty = x[:0].float().to(device)
    yield f"{name}, {mode}, {bound}: an empty batch", there(empty).shape == (0, *g.shape[1:])


def _laid(t: Tensor, layout: str) -> Tensor:
    if layout == "channels last" and t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t.repeat_interleave(2, 0)[::2] if layout == "every second example" else t


def _with_input(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Gradients of the parameters, and of the inputs of examples 0, 2 and 3."""
    x = x.detach().requires_grad_()
    *found, dx = torch.autograd.grad(model(x), [*model.parameters(), x], g)
    return [*found, dx[[0, 2, 3]]]


def blank_places(device: torch.device, arithmetic: Arithmetic) -> Verdicts:
    """A large gradient where an image is blank adds nothing, also next to places that are not blank.

    The bound from input and gradient is 0 there and does not clip. An algorithm that is not a sum of products, such as
    Winograd's, would leave rounding errors of the whole image, times a gradient of any size.
    """
    random = torch.Generator().manual_seed(3)
    for kernel, channels, examples in itertools.product((3, 5), (16, 64), (1, 256)):
        layer = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
        model = clip_inputs(layer, input_norm=1.0, grad_norm=0.1, bound="gradient").to(device)
        x = torch.randn(examples, channels, 32, 32, generator=random)
        x[..., 16:] = 0
        g = 1e6 * torch.randn(examples, channels, 32, 32, generator=random)
        g[..., : 16 + kernel // 2] = 0
        for searches, layout in itertools.product((False, True), (torch.contiguous_format, torch.channels_last)):
            moved = [t.to(device, memory_format=layout) for t in (x, g)]
            with torch.backends.cudnn.flags(benchmark=searches), arithmetic.products():
                (found,) = sums(model.to(memory_format=layout), *moved)
            share = float(found.double().norm()) / (examples * 0.1)
            yield (
                f"blank places, {kernel} x {kernel}, {channels} channels, {examples} examples, "
                f"{arithmetic.name}, {'search' if searches else 'no search'}: {share:.1e} of the bound",
                share <= 1e-3,
            )


def without_waiting(device: torch.device) -> Verdicts:
    """Forward and backward of a clipped network do not synchronize with the device."""
    if device.type != "cuda":
        return
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).to(device)
    model = clip_inputs(model, input_norm=1.0, grad_norm=0.1, bound="gradient")
    x = torch.randn(8, 1, 8, 8, device=device)
    model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield "nothing waits", True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)

    def ieee() -> Verdicts:
        return at_the_device(device, IEEE)

    def tf32() -> Verdicts:
        return at_the_device(device, TF32)

    def blank() -> Verdicts:
        yield from blank_places(device, IEEE)
        yield from blank_places(device, TF32)

    def waiting() -> Verdicts:
        return without_waiting(device)

    def kernels() -> Verdicts:
        return kernels_and_twins(device)

    def layouts() -> Verdicts:
        with IEEE.products():
            yield from layouts_and_what_is_not_finite(device)

    return int(failures_of([kernels, layouts, ieee, tf32, blank, waiting]) > 0)


if __name__ == "__main__":
    sys.exit(main())
