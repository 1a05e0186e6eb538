"""Convolutions on a GPU, without pytest: `python -m tests.gpu.convolution [--check] [--tiles]`.

Measures times, in TensorFloat-32, for ResNet-18's layers at 32 x 32 and a batch of 512, next to cuDNN's forward pass
and summed weight gradient. Then compares the kernel and the sums over windows with float64 on the same device.
--check skips the timing; --tiles adds times for other tile sizes of the kernel. Exit code 1 if a check fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from clipwise.gradients.forms import Budget, Form, Windows
from clipwise.gradients.forms.base import PRODUCT_ERROR, roundoff
from clipwise.gradients.geometry import Geometry
from clipwise.gradients.precision import IEEE, TF32, Arithmetic
from clipwise.gradients.rules import convolution as rule
from clipwise.kernels import convolution as kernel
from tests.gpu.verdicts import Verdicts, failures_of

BATCH = 512
SECONDS = 80.0  # no further layer is timed after this
ENOUGH = 200.0  # milliseconds per measurement
LARGEST = 2**31  # bytes of gradients that are written out by grouped convolutions
PLENTY = 2**40
SUMMED = 1e-5  # relative to the sizes of the terms: above the error of float32 sums of these lengths

# (c, p, size of the image, kernel, stride)
LAYERS = [
    (3, 64, 32, 3, 1),
    (64, 64, 32, 3, 1),
    (64, 128, 32, 3, 2),
    (128, 128, 16, 3, 1),
    (128, 256, 16, 3, 2),
    (256, 256, 8, 3, 1),
    (512, 512, 4, 3, 1),
    (3, 64, 32, 7, 2),
]
ODD = [(5, 20, 13, 3, 2), (17, 33, 9, 5, 1)]
# (channels of the output, columns, positions) of a tile
TILES = [(64, 64, 32), (64, 64, 64), (64, 128, 32), (128, 64, 32), (128, 64, 64), (128, 128, 32), (128, 128, 64)]

Act = Callable[[], object]


def operands(layer: tuple[int, int, int, int, int], B: int) -> tuple[Tensor, Tensor, Geometry]:
    """Images and output gradients [B, 1, ...] of one layer."""
    c, p, size, width, stride = layer
    geometry = Geometry(torch.Size((p, c, width, width)), (stride,) * 2, (width // 2,) * 2, (1, 1))
    places = geometry.places(0, size)
    torch.manual_seed(0)
    x = torch.randn(B, 1, c, size, size, device="cuda")
    return x, torch.randn(B, 1, p, places, places, device="cuda"), geometry


def channels_last(t_BkCHW: Tensor) -> Tensor:
    return t_BkCHW.movedim(2, -1).contiguous().movedim(-1, 2)


def by_kernel(x: Tensor, g: Tensor, at: Geometry, arithmetic: Arithmetic) -> Tensor:
    """Every example's gradient from clipwise's kernel."""
    tf32 = arithmetic is TF32
    return kernel.weight_gradients(x, g, at.kernel, at.stride, at.padding, at.dilation, tf32=tf32)


def check_kernel() -> Verdicts:
    """No entry has more than the rounding error allowed."""
    for layer in LAYERS + ODD:
        x, g, geometry = operands(layer, 4)
        with IEEE.products():
            truth = geometry.weight_gradients(x.double(), g.double())
            sizes = geometry.weight_gradients(x.double().abs(), g.double().abs())
        last = channels_last(x), channels_last(g)
        cases: list[tuple[str, Arithmetic, tuple[Tensor, Tensor]]] = [("NCHW tf32", TF32, (x, g))]
        if layer in ODD:
            cases += [("NCHW ieee", IEEE, (x, g)), ("channels last ieee", IEEE, last)]
        if layer[0] in (64, 128):
            cases += [("channels last tf32", TF32, last)]
        for name, arithmetic, (images, gradients) in cases:
            found = by_kernel(images, gradients, geometry, arithmetic)
            excess = ((found - truth).abs() / ((arithmetic.operand_error + SUMMED) * sizes + 1e-30)).max()
            again = by_kernel(images, gradients, geometry, arithmetic)
            yield f"kernel {layer} {name}: {float(excess):.2g} times the tolerance", bool(excess <= 1)
            yield f"kernel {layer} {name}: another result the second time", torch.equal(found, again)


def check_windows() -> Verdicts:
    """Bounds are at least the released norms, and errors of the summed product are within c u M."""
    for layer in [(128, 256, 16, 3, 2), (256, 256, 8, 3, 1), (512, 512, 4, 3, 1)]:
        x, g, geometry = operands(layer, 4)
        x[0] = x[0, :, :, :1, :1]  # constant images, and gradients that cancel over positions
        signs = 1 - 2.0 * (torch.arange(g.shape[-1], device="cuda") % 2)
        g[0] = g[0, :, :, :1, :1] * signs * (1 + 1e-6 * torch.randn_like(g[0]))
        form, budget = Windows(x, g, geometry), Budget(PLENTY)
        with IEEE.products():
            untightened = form.squared_norms(budget).sqrt()
            pairs = zip(x.double(), g.double(), strict=True)
            truth = torch.stack([geometry.weight_gradient(x_k, g_k) for x_k, g_k in pairs])
            true_norms = truth.flatten(1).norm(dim=1)
            released = [form.weighted_sum(alone) for alone in torch.eye(4, device="cuda").double()]
            for i, sum_alone in enumerate(released):
                unit = roundoff(torch.float32) * form.mass(i)
                error = float((sum_alone.double() - truth[i]).norm()) / unit
                within = bool(sum_alone.double().norm() <= untightened[i])
                yield f"windows {layer}: the summed product errs by {error:.2g} u M", error <= PRODUCT_ERROR
                yield f"windows {layer}: example {i} is longer than its bound", within
            tight = untightened.square()
            form.tighten(tight, budget)
            fits = (tight.sqrt() >= true_norms) & (tight.sqrt() <= true_norms * (1 + 2e-5))
            yield (f"windows {layer}: bounds {tight.sqrt().tolist()} of {true_norms.tolist()}", bool(fits.all()))


def milliseconds(act: Act, rounds: int = 15) -> float:
    """The median device time of a call; fewer rounds for a long one."""
    for _ in range(3):
        act()
    taken: list[float] = []
    while len(taken) < rounds and sum(taken) < ENOUGH:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return median(taken)


def norms_and_sum(make: Callable[[], Form], w_B: Tensor) -> Act:
    """All work of a private step for a layer, in place of the summed weight gradient."""

    def act() -> None:
        form = make()
        form.squared_norms(Budget(PLENTY, TF32))
        form.weighted_sum(w_B)

    return act


def times(layer: tuple[int, int, int, int, int]) -> dict[str, float]:
    """Milliseconds of each method, for one layer."""
    x, g, geometry = operands(layer, BATCH)
    weight = torch.randn(geometry.weight, device="cuda")
    w_B = torch.rand(BATCH, device="cuda", dtype=torch.float64)
    rows, outputs = x[:, 0], g[:, 0]
    last_rows, last_outputs = (t.contiguous(memory_format=torch.channels_last) for t in (rows, outputs))
    last = last_rows[:, None], last_outputs[:, None]

    def written(gradients: rule.Gradients) -> Callable[[], Form]:
        return lambda: rule._written(x, g, geometry.weight, gradients)

    acts: dict[str, Act] = {
        "forward": lambda: torch.conv2d(rows, weight, None, geometry.stride, geometry.padding),
        "sum": lambda: geometry.weight_gradient(rows, outputs),
        "sum, last": lambda: geometry.weight_gradient(last_rows, last_outputs),
        "kernel": lambda: by_kernel(x, g, geometry, TF32),
        "kernel, last": lambda: by_kernel(*last, geometry, TF32),
        "kernel + norm + sum": norms_and_sum(written(partial(rule._by_kernel, geometry)), w_B),
    }
    if 4 * BATCH * geometry.weight.numel() <= LARGEST:
        acts["grouped"] = lambda: geometry.weight_gradients(x, g)
        acts["grouped + norm + sum"] = norms_and_sum(written(geometry.weight_gradients), w_B)
    if outputs.shape[-1] <= 16:
        acts["windows"] = norms_and_sum(lambda: Windows(x, g, geometry), w_B)
    with TF32.products():
        found = {name: milliseconds(act) for name, act in acts.items()}
    form = rule._form(x, g, geometry)
    print(f"{layer!s:24}", *(f"{name} {ms:.2f} |" for name, ms in found.items()), type(form).__name__, flush=True)
    return found


def times_of_tiles(layer: tuple[int, int, int, int, int]) -> None:
    x, g, geometry = operands(layer, BATCH)
    chosen = kernel._tiles
    try:
        for tiles in TILES:
            kernel._tiles = lambda *_, tiles=tiles: tiles  # type: ignore[assignment]
            print(f"{layer!s:24} tiles {tiles}: {milliseconds(lambda: by_kernel(x, g, geometry, TF32)):.2f}")
    finally:
        kernel._tiles = chosen


@torch.no_grad()
def main() -> int:
    start = time.perf_counter()
    if "--check" not in sys.argv:
        print(f"milliseconds at a batch of {BATCH}, tf32, on {torch.cuda.get_device_name()}:")
        for layer in LAYERS:
            if time.perf_counter() - start > SECONDS:
                print(f"{layer}: no time left")
                continue
            times(layer)
    if "--tiles" in sys.argv:
        for layer in LAYERS[1:4]:
            times_of_tiles(layer)
    return 1 if failures_of((check_kernel, check_windows)) else 0


if __name__ == "__main__":
    sys.exit(main())
