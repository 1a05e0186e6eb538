"""Products with operands truncated to 11 bits: the stated sensitivity holds for them too.

On a CPU TensorFloat-32 changes nothing, so the operands of float32 products are truncated here as in tensor cores.
If positions cancel, the remainder of an example is mostly truncation error, which no norm shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import Backprop, PerExample
from clipwise.clipping import Clipper
from clipwise.errors import UnsupportedModelError
from clipwise.gradients import forms
from clipwise.gradients.forms import Budget, Outer, Rows, Tied
from clipwise.gradients.geometry import Geometry
from clipwise.gradients.precision import IEEE, TF32
from clipwise.layers import clip_inputs
from clipwise.privacy import Adjacency
from tests.runs import data, gradients, losses_of, network, private_run
from tests.soundness.neighbours import attach, excess
from tests.soundness.test_cancelling import MODELS, _cancelling_weights

T, M, N = 8, 64, 48  # positions, and the sides of a weight without a materialized gradient
PLENTY = 2**40
STATED = 1 + 2.0**-6  # sensitivity over clipping norm
SLACK = 1 + 1e-5
LOSES_MOST = 1 + 2.0**-10 - 2.0**-23  # is truncated to 1


def cut(x: Tensor) -> Tensor:
    """Truncate to 11 significant bits; float64 marks IEEE products and is unchanged."""
    if x.dtype != torch.float32:
        return x
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@contextmanager
def tensor_cores(norms_too: bool) -> Iterator[None]:
    """Sums of products with cut operands; and norms by inner products of cut rows, beside the mass of uncut ones."""
    product, gram, convolved = forms.outer._product, Outer.gram_squares, Geometry.weight_gradient

    def cut_gram(self: Outer, *rest: Any) -> tuple[Tensor, Tensor]:
        _, mass_B = gram(self, *rest)
        uncut = self.left, self.right
        self.left, self.right = map(cut, uncut)
        square_B, _ = gram(self, *rest)
        self.left, self.right = uncut
        return square_B, mass_B

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forms.outer, "_product", lambda a, b, *rest: product(cut(a), cut(b), *rest))
        patched.setattr(Geometry, "weight_gradient", lambda self, x, g, *rest: convolved(self, cut(x), cut(g), *rest))
        if norms_too:
            patched.setattr(Outer, "gram_squares", cut_gram)
        yield


def test_a_cut_loses_up_to_one_part_in_1024() -> None:
    x = torch.tensor([1.0, LOSES_MOST, -LOSES_MOST, 1 + 2.0**-10, 3e-30, 5e20])
    assert cut(x)[:4].tolist() == [1.0, 1.0, -1.0, 1 + 2.0**-10]
    assert ((cut(x) - x).abs() < 2.0**-10 * x.abs()).all()
    assert cut(x.double()) is not cut(x) and torch.equal(cut(x.double()), x.double())


# Positions of one example


def random_rows() -> tuple[Tensor, Tensor]:
    return torch.randn(T, M), torch.randn(T, N)


def correlated_rows() -> tuple[Tensor, Tensor]:
    return torch.randn(1, M) + 0.1 * torch.randn(T, M), torch.randn(1, N) + 0.1 * torch.randn(T, N)


def cancelling_rows() -> tuple[Tensor, Tensor]:
    left, right = torch.randn(T // 2, M), torch.randn(T // 2, N)
    spread = 1 + torch.rand(T // 2, 1)  # products are truncated differently
    return torch.cat([left, left * spread]), torch.cat([right, -right / spread])


def nearly_cancelling_rows() -> tuple[Tensor, Tensor]:
    left, right = cancelling_rows()
    return left, right * (1 + 1e-3 * torch.randn_like(right))


def rows_that_lose_most() -> tuple[Tensor, Tensor]:
    """a a - (a a) 1: the first is cut to 1, and the second not by as much."""
    a = torch.full((T // 2, 1), LOSES_MOST)
    left = torch.cat([a, a * a]).expand(T, M)
    return left, torch.cat([a, -torch.ones_like(a)]).expand(T, N)


ROWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "random": random_rows,
    "correlated": correlated_rows,
    "cancelling": cancelling_rows,
    "nearly cancelling": nearly_cancelling_rows,
    "lose most": rows_that_lose_most,
}


class Given(nn.Module):
    """A weight with gradient sum_t g_t x_t^T, for any rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(M, N, bias=False)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.a(x) * g).flatten(1).sum(1)


@cache
def settled(matmul_precision: str) -> tuple[nn.Module, Clipper]:
    """A clipper with C = 1, after the first batches, which examine the graph."""
    model = Given()
    clipper = attach(model, PerExample(1.0, method="bookkeeping", matmul_precision=matmul_precision))
    for _ in range(2):
        clipper.clipped_sum(model(torch.randn(3, T, M), torch.randn(3, T, N)))
    return model, clipper


def released(rows: tuple[Tensor, Tensor], norms_too: bool, matmul_precision: str = "tf32") -> float:
    """The norm of the release of one example together with a zero example."""
    model, clipper = settled(matmul_precision)
    x, g = (torch.stack([side, torch.zeros_like(side)]) for side in rows)
    with tensor_cores(norms_too):
        return float(clipper.clipped_sum(model(x, g))["a.weight"].double().norm())


@settings(max_examples=120)
@given(
    kind=st.sampled_from(list(ROWS)),
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-4, 1e4) | st.sampled_from([1e-12, 1e12]),
    norms_too=st.booleans(),
)
def test_no_example_exceeds_the_stated_sensitivity(kind: str, seed: int, scale: float, norms_too: bool) -> None:
    torch.manual_seed(seed)
    left, right = ROWS[kind]()
    assert released((left * scale, right), norms_too) <= STATED * SLACK


@pytest.mark.parametrize("kind", ["cancelling", "lose most"])
def test_without_the_error_term_an_example_exceeds_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a norm without the truncation error."""
    monkeypatch.setattr(forms.Form, "squared_error_B", property(lambda self: None, lambda self, _: None))
    torch.manual_seed(0)
    left, right = ROWS[kind]()
    assert released((left * 1e4, right), False) > 10 * STATED


@pytest.mark.parametrize("kind", ["random", "correlated"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_ordinary_examples_are_clipped_as_in_ieee_arithmetic(kind: str, scale: float) -> None:
    """Bitwise, if the products are equal: only cancelling examples have a larger bound."""
    torch.manual_seed(1)
    model, rows = Given(), [ROWS[kind]() for _ in range(5)]
    x, g = (torch.stack(side) for side in zip(*rows, strict=True))
    sums = [
        attach(model, PerExample(1.0, method="bookkeeping", matmul_precision=matmul_precision)).clipped_sum(
            model(x * scale, g)
        )
        for matmul_precision in ("ieee", "tf32")
    ]
    assert torch.equal(sums[0]["a.weight"], sums[1]["a.weight"])


def test_cancelling_examples_are_clipped_with_the_truncation_error() -> None:
    """More than in IEEE arithmetic, but not to 0."""
    left, right = (side[None] for side in rows_that_lose_most())
    model = Given()
    x, g = torch.cat([left * 100, 0 * left]), torch.cat([right, 0 * right])
    clippers = [attach(model, PerExample(1.0, method="bookkeeping", matmul_precision=p)) for p in ("ieee", "tf32")]
    ieee, tf32 = (float(c.clipped_sum(model(x, g))["a.weight"].norm()) for c in clippers)
    assert tf32 < ieee
    assert released((x[0], g[0]), True) > 0.01


# Whole models


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("norms_too", [False, True])
@pytest.mark.parametrize("method", ["bookkeeping", "reweight"])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_cancelling_positions(name: str, method: str, norms_too: bool) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, x = build(), draw()
    clipper = attach(model, PerExample(1e-3, parts="tensor", method=method, matmul_precision="tf32"))

    def total(x: Tensor) -> dict[str, Tensor]:
        out = model(x)
        noise = 1 + 1e-3 * torch.linspace(-1, 1, out[0].numel()).view(out.shape[1:])
        return clipper.clipped_sum((out * _cancelling_weights(out) * noise).flatten(1).sum(1) * 100)

    total(x)  # the first batches examine the graph
    total(x)
    with tensor_cores(norms_too):
        whole = total(x)
        assert excess(clipper, whole, total(x[1:]), Adjacency.ZERO_OUT) <= SLACK
        assert excess(clipper, whole, total(x[:2]), Adjacency.ZERO_OUT) <= SLACK


def nearly_opposite(share: float) -> tuple[Outer, Rows]:
    """A product with the largest truncation error, and a looked-up row that cancels all but a share of it:
    a tied table."""
    V, n = 20, 12
    left = torch.zeros(1, T, V)
    left[..., 0] = LOSES_MOST
    right = torch.full((1, T, n), LOSES_MOST * 1024)
    row = -(1 - share) * (left[0, :, 0] @ right[0])[None]
    entry = torch.zeros(1, dtype=torch.long)
    return Outer(left, right), Rows(entry, entry, row, 1, torch.Size((V, n)), 1)


@pytest.mark.parametrize(
    ("share", "norms_too"),
    [
        *((share, False) for share in (0.0, 2.0**-9, 2.0**-6, 2.0**-4, 0.2, 1.0)),
        *((share, True) for share in (0.0, 2.0**-9, 1.0)),
        *(pytest.param(share, True) for share in (2.0**-6, 2.0**-4, 0.2)),
    ],
)
def test_a_product_and_rows_that_cancel_each_other(share: float, norms_too: bool) -> None:
    """Their cross term must use the measured rows."""
    form = Tied(*nearly_opposite(share))
    with tensor_cores(norms_too):
        norm = form.squared_norms(Budget(PLENTY, TF32)).sqrt()
        assert form.squared_error_B is not None
        bound = torch.maximum(norm, (norm + form.squared_error_B.sqrt()) / STATED)
        found = form.weighted_sum((1 / bound).clamp(max=1))
    assert float(found.double().norm()) <= STATED * SLACK


# Stated sensitivity and noise


@pytest.mark.parametrize(("sampling", "factor"), [("poisson", 1), ("fixed-size", 2)])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_the_statement_shows_the_larger_sensitivity_and_the_noise_follows_it(
    sampling: str, factor: int, parts: str
) -> None:
    runs = {}
    for matmul_precision in ("ieee", "tf32"):
        clipping = PerExample(0.5, parts=parts, split="equal", matmul_precision=matmul_precision)
        _, private = private_run(clipping=clipping, noise_multiplier=1.3, sampling=sampling)
        runs[matmul_precision] = private
    for own, larger in zip(runs["ieee"].parts(), runs["tf32"].parts(), strict=True):
        assert larger.sensitivity == pytest.approx(own.sensitivity * STATED, rel=1e-12)
        assert larger.noise_std == pytest.approx(own.noise_std * STATED, rel=1e-12)
    if parts == "all":
        (part,) = runs["tf32"].parts()
        assert part.sensitivity == factor * 0.5 * STATED
        assert part.noise_std == pytest.approx(1.3 * part.sensitivity, rel=1e-9)
    statement = runs["tf32"].statement()
    assert f"{runs['tf32'].parts()[0].sensitivity:g}" in str(statement)
    assert statement.to_dict()["parts"][0]["sensitivity"] == runs["tf32"].parts()[0].sensitivity
    assert runs["ieee"].noise_multiplier == runs["tf32"].noise_multiplier  # the same privacy


def test_the_noise_that_is_drawn_has_that_size() -> None:
    """The same key draws the same normals, at another scale. Both ledgers are equal."""
    found = {}
    for matmul_precision in ("ieee", "tf32"):
        model, private = private_run(
            network(torch.float64),
            dataset=data(dtype=torch.float64),
            clipping=PerExample(0.5, matmul_precision=matmul_precision),
            noise_multiplier=1.3,
            sampling="full",
        )
        private._context.keys.key = type(private._context.keys.key)(bytes(range(1, 33)))
        private.backward(losses_of(model, next(iter(private.loader))))
        noisy = gradients(model)
        expected = private._context.clipper.clipped_sum(losses_of(model, data(dtype=torch.float64).tensors))
        found[matmul_precision] = torch.cat([(noisy[n] * 40 - expected[n]).flatten() for n in noisy])
    torch.testing.assert_close(found["tf32"], found["ieee"] * STATED, rtol=1e-9, atol=1e-12)
    assert float(found["tf32"].norm()) > 0


def test_the_arithmetic_is_part_of_what_a_run_is() -> None:
    """A resume file of another arithmetic is refused."""
    prints = set()
    for matmul_precision in ("ieee", "tf32"):
        _, private = private_run(clipping=PerExample(0.5, matmul_precision=matmul_precision))
        assert private.state_dict()["configuration"]["arithmetic"] == matmul_precision
        prints.add(private.state_dict()["fingerprint"])
    assert len(prints) == 2


def test_tf32_is_not_used_on_a_cpu() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        clipper = attach(network(), PerExample(0.5))
    finally:
        torch.set_float32_matmul_precision(before)
    assert clipper.arithmetic is IEEE
    assert clipper.bounds[0].sensitivity == 0.5


# Backpropagation clipping: torch sums in the dtype of the weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_below_float32_are_refused_by_name(dtype: torch.dtype) -> None:
    """512 examples that agree: in bfloat16 their sum moved by 1.8 times the sensitivity."""
    with pytest.raises(UnsupportedModelError, match=r"'0\.layer\.weight' has dtype .*float16.*autocast"):
        attach(clip_inputs(network(dtype), input_norm=1.0), Backprop())
    model = clip_inputs(network(), input_norm=1.0)
    clipper = attach(model, Backprop())
    model.to(dtype)  # later on
    with pytest.raises(UnsupportedModelError, match="has dtype"):
        clipper.clipped_sum(model(torch.randn(4, 5, dtype=dtype)).sum(1))
    frozen = network(dtype).requires_grad_(False)
    frozen.append(nn.Linear(3, 2))
    attach(clip_inputs(frozen, input_norm=1.0), Backprop())  # frozen: no sum


AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "linear over positions": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.Flatten()),
    "layer norm": lambda: nn.LayerNorm(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
}


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_sums_under_autocast_are_those_of_float32(name: str, mode: str) -> None:
    """If one of 512 equal examples is reversed, the sum moves by twice the bound, without bfloat16 error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), AUTOCAST[name]())  # the first one returns bfloat16
    clip_inputs(model, input_norm=1.0, grad_norm=0.5, mode=mode)
    clipper = attach(model, Backprop())
    x, u = torch.randn(1, 6) + 0.01 * torch.randn(512, 6), 10 * torch.randn(1, 6).repeat(512, 1)

    def total(first: float) -> dict[str, Tensor]:
        factors = torch.ones(512, 1)
        factors[0] = first
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return clipper.clipped_sum((y.float() * u * factors).sum(1))

    assert excess(clipper, total(1.0), total(-3.0), Adjacency.REPLACE_ONE) <= 1 + 512 * 2.0**-18


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
def test_recurrent_layers_under_autocast_are_clipped_too(kind: type[nn.RNNBase], bias: bool) -> None:
    """Their fused operation is in bfloat16, and gives what float32 gives up to its rounding."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = kind(4, 5, batch_first=True, num_layers=2, bidirectional=True, bias=bias)  # type: ignore[misc]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.run(x)[0][:, -1]
            return y

    torch.manual_seed(0)
    model, x, factors_B = Last(), torch.randn(3, 6, 4), torch.tensor([1.0, 1e3, 0.0])

    def clipped_sum(max_norm: float, reduced: bool, weights_B: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            outputs = model(x)
        found = attach(model, PerExample(max_norm)).clipped_sum(outputs.float().logsumexp(1) * weights_B)
        return torch.cat([g.flatten() for g in found.values()])

    plain, reduced = (clipped_sum(1e9, way, torch.ones(3)) for way in (False, True))
    assert float((plain - reduced).norm() / plain.norm()) < 0.05
    alone = clipped_sum(0.01, True, torch.tensor([0.0, 1e3, 0.0]))
    assert 0.999 <= float(alone.norm()) / 0.01 <= SLACK
    assert float(clipped_sum(0.01, True, factors_B).norm()) <= 0.02 * SLACK
