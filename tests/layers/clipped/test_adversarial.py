"""An adversary looks for inputs and upstream gradients that pass a bound, by gradient ascent on (true norm / bound).

Bounds are written here a second time, in operations that can be differentiated. The clipped layer must then do with
what was found exactly what these formulas say, so that an error in either of them shows: in mode "normalize" the
gradient of one example is

    AIM C1 C2 |dW| / n   (bound "gradient"),     AIM C2 |dW| / n   (bound "upstream").

`python -m tests.layers.clipped.test_adversarial` prints the table of docs/backprop.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.layers import clip_inputs
from clipwise.layers.clipped.scales import AIM

STEPS, RATE = 120, 0.1
C2 = 0.7


@dataclass
class Measured:
    """Of one example: true norms of gradients, and what bounds them, by parameter."""

    norm: dict[str, Tensor]
    gradient: dict[str, Tensor]  # n >= |dW|
    upstream: dict[str, Tensor]  # n |x| >= |dW|; of what looks at the input alone, as "gradient"


Measure = Callable[[nn.Module, Tensor, Tensor], Measured]
Ratio = Callable[[Tensor, Tensor], Tensor]


def channels(lengths_P: Tensor, g_cP: Tensor) -> Tensor:
    """|(sum_p l_p |g_cp|)_c|."""
    return (lengths_P * g_cP.abs()).sum(-1).norm()


def linear(layer: Any, x_Td: Tensor, g_Tc: Tensor) -> Measured:
    return Measured(
        {"weight": (g_Tc.T @ x_Td).norm()},
        {"weight": channels(x_Td.norm(dim=1), g_Tc.T)},
        {"weight": g_Tc.norm()},
    )


def convolution(layer: Any, x: Tensor, g: Tensor) -> Measured:
    windows_GdP = _windows(layer, x)
    g_GcP = g.reshape(layer.groups, -1, windows_GdP.shape[-1])
    dw = torch.einsum("gdp,gcp->gcd", windows_GdP, g_GcP)
    by_window = (windows_GdP.norm(dim=1)[:, None] * g_GcP.abs()).sum(-1).norm()
    # Which window holds which pixel, counted with one channel.
    pixels = torch.arange(1.0, 1 + x[0].numel(), dtype=x.dtype).view(1, *x.shape[1:])
    one = nn.Conv2d(
        1, 1, layer.kernel_size, layer.stride, layer.padding, layer.dilation, padding_mode=layer.padding_mode
    )
    held = _windows(one, pixels)[0].T.round().long()  # [P, k], 0 for padding
    counts_Pn = F.one_hot(held, 1 + x[0].numel()).sum(1)[:, 1:]
    most, cover = int(counts_Pn.max()), int(counts_Pn.sum(0).max())
    l12 = math.sqrt(most) * g_GcP.abs().sum(-1).norm()
    l2 = math.sqrt(cover) * g.norm()
    return Measured({"weight": dw.norm()}, {"weight": by_window}, {"weight": torch.minimum(l12, l2)})


def _windows(layer: Any, x: Tensor) -> Tensor:
    """[G, d k k, P]: what each position looks at, group by group."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x[None], layer._reversed_padding_repeated_twice, mode)
    by_group = padded.view(layer.groups, -1, *padded.shape[2:])
    return F.unfold(by_group, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)


def recurrent(layer: Any, x_Td: Tensor, g_TH: Tensor) -> Measured:
    """Step by step, with a zero added to all that a gate sees: its gradient is dz."""
    run = layer
    zeros_TG = torch.zeros(len(x_Td), run.weight_hh_l0.shape[0], dtype=x_Td.dtype, requires_grad=True)
    h = c = torch.zeros(run.hidden_size, dtype=x_Td.dtype)
    before, outputs = [], []
    for x_d, zero_G in zip(x_Td, zeros_TG, strict=True):
        before.append(h)
        z = run.weight_ih_l0 @ x_d + run.bias_ih_l0 + run.weight_hh_l0 @ h + run.bias_hh_l0 + zero_G
        if isinstance(run, nn.LSTM):
            i, f, new, o = z.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            h = z.tanh()
        outputs.append(h)
    (dz_TG,) = torch.autograd.grad(torch.stack(outputs), zeros_TG, g_TH, create_graph=True)
    before_TH = torch.stack(before)
    by_input, by_state = (channels(rows.norm(dim=1), dz_TG.T) for rows in (x_Td, before_TH))
    return Measured(
        {"weight_ih_l0": (dz_TG.T @ x_Td).norm(), "weight_hh_l0": (dz_TG.T @ before_TH).norm()},
        {"weight_ih_l0": by_input, "weight_hh_l0": by_state},
        {"weight_ih_l0": dz_TG.norm(), "weight_hh_l0": by_state},
    )


def conv(*sizes: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*sizes, **options)  # type: ignore[arg-type]


# The layer, its input and output without the axis of examples, and its formulas.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Measure]] = {
    "linear over positions": (lambda: nn.Linear(5, 3), (4, 5), linear),
    "convolution": (conv(2, 3, 3), (2, 6, 5), convolution),
    "padding": (conv(2, 3, 3, padding=2), (2, 5, 5), convolution),
    "stride": (conv(2, 3, 4, stride=2, padding=1), (2, 7, 7), convolution),
    "dilation": (conv(2, 3, 3, dilation=2, padding=2), (2, 6, 6), convolution),
    "groups": (conv(4, 6, 3, groups=2, padding=1), (4, 4, 4), convolution),
    "circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4), convolution),
    "circular, kernel beyond the input": (
        conv(1, 2, 5, padding=3, padding_mode="circular"),
        (1, 3, 3),
        convolution,
    ),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (5, 3), recurrent),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), (5, 3), recurrent),
}


def built(name: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The layer, an input and an upstream gradient to begin with."""
    build, shape, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = build().double()
        x = torch.randn(shape, dtype=torch.float64)
        y = output(layer, x)
        return layer, x, torch.randn_like(y)


def output(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x[None])
    found: Tensor = y[0] if isinstance(y, tuple) else y
    return found[0]


def ascend(ratio: Ratio, *start: Tensor) -> tuple[Tensor, Tensor, float]:
    """Where it leads, and the largest ratio on the way."""
    x, g = (t.detach().clone().requires_grad_() for t in start)
    adam = torch.optim.Adam([x, g], RATE)
    largest = 0.0
    for _ in range(STEPS):
        here = ratio(x, g)
        largest = max(largest, float(here.detach()))
        adam.zero_grad()
        (-here.log()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return x.detach(), g.detach(), largest


def ratios(name: str, layer: nn.Module, x: Tensor, g: Tensor, bound: str) -> dict[str, Ratio]:
    """By parameter: norm / bound, as a function of input and upstream gradient."""
    _, _, measure = CASES[name]
    layer.requires_grad_(False)

    def ratio(x: Tensor, g: Tensor, parameter: str) -> Tensor:
        found = measure(layer, x, g)
        most = getattr(found, bound)[parameter]
        looks_at_upstream = bound == "upstream" and parameter != "weight_hh_l0"
        return found.norm[parameter] / (most * x.norm() if looks_at_upstream else most)

    return {parameter: partial(ratio, parameter=parameter) for parameter in measure(layer, x, g).norm}


@pytest.mark.parametrize("bound", ["gradient", "upstream"])
@pytest.mark.parametrize("name", CASES)
def test_no_ascent_passes_a_bound(name: str, bound: str) -> None:
    layer, x, g = built(name, seed=len(name))
    for parameter, ratio in ratios(name, layer, x, g, bound).items():
        worst_x, worst_g, largest = ascend(ratio, x, g)
        assert largest <= 1 + 1e-9
        # Otherwise it was no attack. That it comes so near shows that no smaller constant would do.
        assert largest > (0.9 if bound == "gradient" else 0.6), largest
        assert_clipped_as_said(name, layer, worst_x, worst_g, bound, parameter)


def assert_clipped_as_said(
    name: str, layer: nn.Module, x: Tensor, g: Tensor, bound: str, parameter: str
) -> None:
    build, _, measure = CASES[name]
    input_norm = 1.001 * float(x.norm())  # nothing is clipped on the way in
    model = build().double()
    model.load_state_dict(layer.state_dict())
    model = clip_inputs(model, input_norm=input_norm, grad_norm=C2, mode="normalize", bound=bound)
    weights = getattr(model.layer, parameter)
    (found,) = torch.autograd.grad(output(model, x), [weights], g)
    told = measure(layer, x, g)
    is_upstream = bound == "upstream" and parameter != "weight_hh_l0"
    expected = AIM * C2 * float((told.norm[parameter] / getattr(told, bound)[parameter]).detach())
    expected *= 1.0 if is_upstream else input_norm
    assert math.isclose(float(found.norm()), expected, rel_tol=1e-6)
    assert float(found.norm()) <= input_norm * C2


def main() -> None:
    """Where each ascent begins and ends."""
    print(
        "| layer | `gradient`, random start | `gradient`, found | `upstream`, random start | `upstream`, found |"
    )
    print("|---|---:|---:|---:|---:|")
    for name in CASES:
        rows: dict[str, list[str]] = {}
        for bound in ("gradient", "upstream"):
            layer, x, g = built(name, seed=len(name))
            for parameter, ratio in ratios(name, layer, x, g, bound).items():
                start, (_, _, found) = float(ratio(x, g).detach()), ascend(ratio, x, g)
                rows.setdefault(parameter, []).extend((f"{start:.2f}", f"{found:.3f}"))
        for parameter, cells in rows.items():
            print(f"| {name}, {parameter.removesuffix('_l0')} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
