"""Queries, keys and values with one clip, as a separate graph node with given output gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from clipwise import kernels
from clipwise.layers import clip_inputs
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.attention import ClippedAttention, ClippedProjections

B, T, D = 3, 4, 6
WAYS = [(mode, bound) for mode in ("clip", "normalize") for bound in ("upstream", "gradient")]
every_way = pytest.mark.parametrize(("mode", "bound"), WAYS)


def attention(dtype: torch.dtype = torch.float64, **options: object) -> ClippedAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(D, 2, batch_first=True, dtype=dtype)
        nn.init.normal_(layer.in_proj_bias)
    model = clip_inputs(layer, **{"input_norm": 1.5, "grad_norm": 0.7, **options})  # type: ignore[arg-type]
    assert isinstance(model, ClippedAttention)
    return model


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: ClippedAttention, inputs: list[Tensor], gs: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of weight, bias and inputs."""
    weight, bias = model.layer.in_proj_weight, model.layer.in_proj_bias
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = ClippedProjections.apply(*inputs, weight, bias, model._in)  # type: ignore[no-untyped-call]
    dw, db, *dx = torch.autograd.grad(outputs, [weight, bias, *inputs], gs)
    return dw, db, dx


@every_way
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_one_projection_alone_is_a_linear_layer(mode: str, bound: str, third: int, scale: float) -> None:
    model = attention(mode=mode, bound=bound)
    x, g = scale * random(B, T, D, seed=1), 3 * random(B, T, D, seed=2)
    gs = [g if k == third else torch.zeros_like(g) for k in range(3)]
    dw, db, dx = gradients(model, [x, x.clone(), x.flip(1)], gs)
    rows = slice(third * D, (third + 1) * D)
    linear = nn.Linear(D, D, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(model.layer.in_proj_weight[rows])
        linear.bias.copy_(model.layer.in_proj_bias[rows])
    alone = clip_inputs(linear, input_norm=1.5, grad_norm=0.7, mode=mode, bound=bound)
    own = (x.flip(1) if third == 2 else x).detach().requires_grad_()
    expected = torch.autograd.grad(alone(own), [linear.weight, linear.bias, own], g)
    for found, e in zip((dw[rows], db[rows], dx[third]), expected, strict=True):
        torch.testing.assert_close(found, e, rtol=1e-9, atol=1e-12)
    assert float(dw.norm()) == pytest.approx(float(dw[rows].norm()))  # and 0 elsewhere


@every_way
def test_squares_of_the_projections_add_up(mode: str, bound: str) -> None:
    model = attention(mode=mode, bound=bound)
    inputs = [random(1, t, D, seed=t) for t in (T, 5, 5)]
    gs = [10.0**k * random(1, t, D, seed=7 + k) for k, t in enumerate((T, 5, 5))]
    n = []
    for x, g in zip(inputs, gs, strict=True):
        kept = x * min(1.0, 1.5 / float(x.norm()))
        by_windows = (kept.norm(dim=2)[..., None] * g.abs()).sum(1).norm()
        n.append(float(by_windows) if bound == "gradient" else 1.5 * float(g.norm()))
    dw, db, _ = gradients(model, inputs, gs)
    true = torch.cat([(g[0].T @ x[0]) * min(1.0, 1.5 / float(x.norm())) for x, g in zip(inputs, gs, strict=True)])
    torch.testing.assert_close(dw, true * (1.5 * 0.7 / math.hypot(*n)), rtol=3e-3, atol=1e-6)
    sums = torch.cat([g[0].sum(0) for g in gs])
    torch.testing.assert_close(db, sums * (0.7 / float(sums.norm())), rtol=3e-3, atol=1e-6)


def test_a_bias_gradient_whose_terms_cancel_is_not_scaled_up() -> None:
    model = attention(torch.float32, mode="normalize")
    g = torch.ones(1, T, D)
    g[:, T // 2 :] = -1 + 2.0**-20
    _, db, _ = gradients(model, [torch.ones(1, T, D)] * 3, [g] * 3)
    assert 0 < float(db.norm()) < 2.0**-12


@pytest.mark.parametrize("bound", ["upstream", "gradient"])
@pytest.mark.parametrize("third", range(3))
def test_a_non_finite_gradient_is_recorded(third: int, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured step on a GPU. If rows are cleared, the example counts as 0 and affects no other."""
    monkeypatch.setattr(kernels, "usable", lambda t: True)
    model = attention(torch.float32, bound=bound)
    model.layer.in_proj_bias.requires_grad_(False)
    x = random(B, T, D, seed=1).float()
    gs = [random(B, T, D, seed=k).float() for k in range(3)]
    gs[third][1, 2, 3] = math.nan
    weight = model.layer.in_proj_weight

    def summed(rows: list[int]) -> Tensor:
        given = x[rows], x[rows], x[rows], weight, model.layer.in_proj_bias, model._in
        outputs = ClippedProjections.apply(*given)  # type: ignore[no-untyped-call]
        (found,) = torch.autograd.grad(outputs, weight, [g[rows] for g in gs])
        return found

    with switch.noting() as factors:
        summed([0, 1, 2])
    assert any(bool(f[1] == 0) for f in factors) and all(bool(f[0] > 0) for f in factors)
    torch.testing.assert_close(summed([0, 1, 2]), summed([0, 2]))
