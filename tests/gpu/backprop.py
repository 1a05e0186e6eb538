"""Clipped layers on a GPU, against float64 on a CPU: `python -m tests.gpu.backprop [--device cuda]`.

Sums of a batch, what one example adds at most (in IEEE arithmetic and in TF32), and that a step of a small network does
not make the host wait. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor, nn

from clipwise.gradients.precision import IEEE, TF32, Arithmetic
from clipwise.layers import clip_inputs
from tests.gpu.verdicts import Verdicts, failures_of
from tests.layers.clipped.cases import CASES, bounds, clipped, inputs

WAYS = [(mode, bound) for mode in ("clip", "normalize") for bound in ("upstream", "gradient")]
CLOSE = {"ieee": 1e-3, "tf32": 5e-2}


def sums(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x), list(model.parameters()), g))


def at_the_device(device: torch.device, arithmetic: Arithmetic) -> Verdicts:
    """Every layer and way: the same sums as in float64, and within their bounds."""
    for name, case in CASES.items():
        for mode, bound in WAYS:
            model = clipped(case, mode=mode, bound=bound)
            there = copy.deepcopy(model).float().to(device)
            x = inputs(case, scale=3.0)
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


def without_waiting(device: torch.device) -> Verdicts:
    """Forward and backward of a clipped network ask the device nothing."""
    if device.type != "cuda":
        return
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).to(
        device
    )
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

    def waiting() -> Verdicts:
        return without_waiting(device)

    return int(failures_of([ieee, tf32, waiting]) > 0)


if __name__ == "__main__":
    sys.exit(main())
