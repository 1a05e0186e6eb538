"""Adversarial search for inputs and upstream gradients that exceed a bound: ascent on (true norm / bound).

The bounds are implemented here a second time, in differentiable operations. The clipped layer must agree with these
formulas at the result of the search: in mode "normalize" the gradient of one example is

    AIM C1 C2 |dW| / n   (bound "gradient"),     AIM C2 |dW| / n   (bound "upstream").

`python -m tests.layers.clipped.test_adversarial` prints the table of docs/papers/backprop-clipping.md.
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
from clipwise.layers.clipped.layer import AIM

STEPS, RATE = 120, 0.1
C2 = 0.7


@dataclass
class Measured:
    """True gradient norms of one example and their bounds, by parameter."""

    norm: dict[str, Tensor]
    gradient: dict[str, Tensor]  # n >= |dW|
    upstream: dict[str, Tensor]  # n |x| >= |dW|; as "gradient" if the bound does not use the input
    times_input: frozenset[str] = frozenset()  # parameters with bound C1 C2; the others have C2

    def with_exact(self, **norms: Tensor) -> Measured:
        """Add parameters that are clipped by their exact norms."""
        for known in (self.norm, self.gradient, self.upstream):
            known.update(norms)
        return self


def of_weights(norm: dict[str, Tensor], gradient: dict[str, Tensor], upstream: dict[str, Tensor]) -> Measured:
    """Matrices, with bound C1 C2."""
    return Measured(norm, gradient, upstream, frozenset(norm))


Measure = Callable[[nn.Module, Tensor, Tensor], Measured]
Ratio = Callable[[Tensor, Tensor], Tensor]


def channels(lengths_P: Tensor, g_cP: Tensor) -> Tensor:
    """|(sum_p l_p |g_cp|)_c|."""
    return (lengths_P * g_cP.abs()).sum(-1).norm()


def linear(layer: Any, x_Td: Tensor, g_Tc: Tensor) -> Measured:
    return of_weights(
        {"weight": (g_Tc.T @ x_Td).norm()}, {"weight": channels(x_Td.norm(dim=1), g_Tc.T)}, {"weight": g_Tc.norm()}
    ).with_exact(bias=g_Tc.sum(0).norm())


def convolution(layer: Any, x: Tensor, g: Tensor) -> Measured:
    windows_GdP = _windows(layer, x)
    g_GcP = g.reshape(layer.groups, -1, windows_GdP.shape[-1])
    dw = torch.einsum("gdp,gcp->gcd", windows_GdP, g_GcP)
    by_window = (windows_GdP.norm(dim=1)[:, None] * g_GcP.abs()).sum(-1).norm()
    # Which window contains which pixel, from one channel.
    pixels = torch.arange(1.0, 1 + x[0].numel(), dtype=x.dtype).view(1, *x.shape[1:])
    one = type(layer)(
        1, 1, layer.kernel_size, layer.stride, layer.padding, layer.dilation, padding_mode=layer.padding_mode
    )
    held = _windows(one, pixels)[0].T.round().long()  # [P, k], 0 for padding
    counts_Pn = F.one_hot(held, 1 + x[0].numel()).sum(1)[:, 1:]
    most, cover = int(counts_Pn.max()), int(counts_Pn.sum(0).max())
    l12 = math.sqrt(most) * g_GcP.abs().sum(-1).norm()
    l2 = math.sqrt(cover) * g.norm()
    found = of_weights({"weight": dw.norm()}, {"weight": by_window}, {"weight": torch.minimum(l12, l2)})
    return found.with_exact(bias=g.flatten(1).sum(1).norm())


def _windows(layer: Any, x: Tensor) -> Tensor:
    """[G, d k ..., P]: the window of each position, per group."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x[None], layer._reversed_padding_repeated_twice, mode)
    windows = padded.view(layer.groups, -1, *padded.shape[2:])
    sizes = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    for axis, (k, s, d) in enumerate(sizes):
        windows = windows.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]  # [G, d, *places, *within a window]
    n = len(sizes)
    order = (0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    return windows.permute(order).flatten(1, 1 + n).flatten(2)


def recurrent(layer: Any, x_Td: Tensor, g_TH: Tensor) -> Measured:
    """Step by step, with zeros added to the gates on the input's and the state's side: their gradients are dz."""
    run = layer
    zeros = [torch.zeros(len(x_Td), run.weight_hh_l0.shape[0], dtype=x_Td.dtype, requires_grad=True) for _ in range(2)]
    h = c = torch.zeros(run.hidden_size, dtype=x_Td.dtype)
    before, outputs = [], []
    for x_d, zero_i, zero_h in zip(x_Td, *zeros, strict=True):
        before.append(h)
        of_input = run.weight_ih_l0 @ x_d + run.bias_ih_l0 + zero_i
        of_state = run.weight_hh_l0 @ h + run.bias_hh_l0 + zero_h
        if isinstance(run, nn.LSTM):
            i, f, new, o = (of_input + of_state).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
        elif isinstance(run, nn.GRU):
            (reset, update, new), (reset_h, update_h, new_h) = of_input.chunk(3), of_state.chunk(3)
            keeps = (update + update_h).sigmoid()
            h = keeps * h + (1 - keeps) * (new + (reset + reset_h).sigmoid() * new_h).tanh()
        else:
            h = (of_input + of_state).tanh()
        outputs.append(h)
    dz, dz_h = torch.autograd.grad(torch.stack(outputs), zeros, g_TH, create_graph=True)
    before_TH = torch.stack(before)
    by_input, by_state = channels(x_Td.norm(dim=1), dz.T), channels(before_TH.norm(dim=1), dz_h.T)
    found = of_weights(
        {"weight_ih_l0": (dz.T @ x_Td).norm(), "weight_hh_l0": (dz_h.T @ before_TH).norm()},
        {"weight_ih_l0": by_input, "weight_hh_l0": by_state},
        {"weight_ih_l0": dz.norm(), "weight_hh_l0": by_state},
    )
    return found.with_exact(bias_ih_l0=dz.sum(0).norm(), bias_hh_l0=dz_h.sum(0).norm())


def embedding(layer: Any, ids_T: Tensor, g_Td: Tensor) -> Measured:
    held_TV = F.one_hot(ids_T, layer.num_embeddings).to(g_Td.dtype)
    true = (held_TV.T @ g_Td).norm()
    bound = torch.minimum(g_Td.abs().sum(0).norm(), held_TV.sum(0).max().sqrt() * g_Td.norm())
    return Measured({"weight": true}, {"weight": bound}, {"weight": bound})


def normalization(layer: Any, x: Tensor, g: Tensor) -> Measured:
    if isinstance(layer, nn.LayerNorm):
        by_row, g_cP = x.flatten(0, -2), g.flatten(0, -2).T
    else:
        by_row, g_cP = x.reshape(layer.num_groups, -1), g.flatten(1)
    centred = by_row - by_row.mean(1, keepdim=True)
    normal = centred / (centred.square().mean(1, keepdim=True) + layer.eps).sqrt()
    normal_cP = normal.T if isinstance(layer, nn.LayerNorm) else normal.reshape(x.shape).flatten(1)
    return Measured({}, {}, {}).with_exact(weight=(g_cP * normal_cP).sum(1).norm(), bias=g_cP.sum(1).norm())


def attention(layer: Any, x_Td: Tensor, g_Td: Tensor) -> Measured:
    """Queries, keys and values together. The output projection is a linear layer over positions."""
    T, d, H = len(x_Td), layer.embed_dim, layer.num_heads
    zeros = [torch.zeros(T, d, dtype=x_Td.dtype, requires_grad=True) for _ in range(3)]
    thirds = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), zeros, strict=True)
    q, k, v = ((x_Td @ w.T + b + zero).view(T, H, d // H).transpose(0, 1) for w, b, zero in thirds)
    mixed_Td = ((q @ k.mT / math.sqrt(d // H)).softmax(-1) @ v).transpose(0, 1).reshape(T, d)
    y = mixed_Td @ layer.out_proj.weight.T
    passed = torch.autograd.grad(y, zeros, g_Td, create_graph=True)
    dz_Tc = torch.cat(passed, 1)
    return of_weights(
        {"in_proj_weight": (dz_Tc.T @ x_Td).norm()},
        {"in_proj_weight": channels(x_Td.norm(dim=1), dz_Tc.T)},
        {"in_proj_weight": dz_Tc.norm()},
    ).with_exact(in_proj_bias=dz_Tc.sum(0).norm())


def conv(*sizes: int, kind: Any = nn.Conv2d, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*sizes, **options)


# The layer, its input and output without the axis of examples, and its formulas.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Measure]] = {
    "linear over positions": (lambda: nn.Linear(5, 3), (4, 5), linear),
    "convolution": (conv(2, 3, 3), (2, 6, 5), convolution),
    "padding": (conv(2, 3, 3, padding=2), (2, 5, 5), convolution),
    "stride": (conv(2, 3, 4, stride=2, padding=1), (2, 7, 7), convolution),
    "dilation": (conv(2, 3, 3, dilation=2, padding=2), (2, 6, 6), convolution),
    "groups": (conv(4, 6, 3, groups=2, padding=1), (4, 4, 4), convolution),
    "circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4), convolution),
    "circular, kernel beyond the input": (conv(1, 2, 5, padding=3, padding_mode="circular"), (1, 3, 3), convolution),
    "reflect": (conv(2, 3, 3, padding=2, padding_mode="reflect"), (2, 4, 4), convolution),
    "replicate": (conv(2, 3, 3, padding=1, padding_mode="replicate"), (2, 4, 4), convolution),
    "one dimension": (conv(2, 3, 3, kind=nn.Conv1d, padding=1), (2, 7), convolution),
    "three dimensions": (conv(1, 2, 2, kind=nn.Conv3d), (1, 3, 3, 3), convolution),
    "embedding": (lambda: nn.Embedding(4, 3), (7,), embedding),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4), normalization),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2), normalization),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (4, 4), attention),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (5, 3), recurrent),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), (5, 3), recurrent),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (5, 3), recurrent),
}


def built(name: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = build().double()
        is_table = isinstance(layer, nn.Embedding)
        x = torch.randint(4, shape) if is_table else torch.randn(shape, dtype=torch.float64)
        y = output(layer, x)
        return layer, x, torch.randn_like(y)


def output(layer: nn.Module, x: Tensor) -> Tensor:
    is_attention = isinstance(getattr(layer, "layer", layer), nn.MultiheadAttention)
    y = layer(*[x[None]] * 3, need_weights=False) if is_attention else layer(x[None])
    found: Tensor = y[0] if isinstance(y, tuple) else y
    return found[0]


def ascend(ratio: Ratio, *start: Tensor) -> tuple[Tensor, Tensor, float]:
    """The result of the ascent, and the largest ratio."""
    x, g = (t.detach().clone().requires_grad_(t.is_floating_point()) for t in start)  # ids stay
    largest = float(ratio(x, g).detach())
    if math.isclose(largest, 1, rel_tol=1e-12):  # an exact norm
        return x.detach(), g.detach(), largest
    adam = torch.optim.Adam([t for t in (x, g) if t.requires_grad], RATE)
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
        return found.norm[parameter] / (most * x.norm() if is_upstream(found, bound, parameter) else most)

    return {parameter: partial(ratio, parameter=parameter) for parameter in measure(layer, x, g).norm}


def is_upstream(found: Measured, bound: str, parameter: str) -> bool:
    """Whether the bound is |x| times a factor: not for states, whose norms are known, nor for vectors."""
    return bound == "upstream" and parameter in found.times_input and parameter != "weight_hh_l0"


@pytest.mark.parametrize("bound", ["gradient", "upstream"])
@pytest.mark.parametrize("name", CASES)
def test_no_ascent_exceeds_a_bound(name: str, bound: str) -> None:
    layer, x, g = built(name, seed=len(name))
    for parameter, ratio in ratios(name, layer, x, g, bound).items():
        worst_x, worst_g, largest = ascend(ratio, x, g)
        assert largest <= 1 + 1e-9
        # The search must nearly reach the bound, which shows that no smaller constant would be valid.
        assert largest > (0.9 if bound == "gradient" else 0.6), largest
        assert_clipped_as_said(name, layer, worst_x, worst_g, bound, parameter)


def assert_clipped_as_said(name: str, layer: nn.Module, x: Tensor, g: Tensor, bound: str, parameter: str) -> None:
    build, _, measure = CASES[name]
    # No input is clipped; for attention, no output either.
    input_norm = (100 if name == "attention" else 1.001) * float(x.double().norm())
    model = build().double()
    model.load_state_dict(layer.state_dict())
    model = clip_inputs(model, input_norm=input_norm, grad_norm=C2, mode="normalize", bound=bound)
    weights = model.layer.get_parameter(parameter)  # type: ignore[operator]
    (found,) = torch.autograd.grad(output(model, x), [weights], g)
    measured = measure(layer, x, g)
    most = C2
    expected = AIM * most * float((measured.norm[parameter] / getattr(measured, bound)[parameter]).detach())
    if parameter in measured.times_input:
        most *= input_norm
        expected *= 1.0 if is_upstream(measured, bound, parameter) else input_norm
    assert math.isclose(float(found.norm()), expected, rel_tol=1e-6)
    assert float(found.norm()) <= most


def main() -> None:
    print("| layer | `gradient`, random start | `gradient`, found | `upstream`, random start | `upstream`, found |")
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
