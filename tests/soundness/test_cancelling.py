"""Positions that cancel: the norm may be tiny compared with its terms.

Rounding errors scale with the terms. If a norm is not computed from the same numbers that are summed
later, it must bound *their* norm: for every method, at every scale.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.gradients import Memory, examples, forms, per_example_gradients
from clipwise.gradients.forms import Budget, Form, Outer, Rows, measured
from clipwise.privacy import Adjacency
from tests.gradients.cases import Scale, trainable
from tests.soundness.neighbours import attach, excess

PLENTY = 2**40
SCALES = [1e-30, 1e-15, 1e-5, 1.0, 1e5, 1e15]
SLACK = 1 + 1e-5


def cancelling_pairs(T: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Positions in pairs of the same left and opposite right side: their products cancel exactly."""
    half, same = torch.randn(T // 2, m, dtype=dtype), torch.randn(T // 2, n, dtype=dtype)
    order = torch.randperm(T)
    return torch.cat([half, half])[order], torch.cat([same, -same])[order]


def nearly(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a small remainder."""
    return left, right * (1 + 1e-6 * torch.randn_like(right))


def batch_of(T: int, m: int, n: int, scale: float) -> tuple[Tensor, Tensor]:
    """Cancelling, nearly cancelling, ordinary and zero examples together."""
    torch.manual_seed(0)
    ordinary = torch.randn(T, m), torch.randn(T, n)
    examples = [
        cancelling_pairs(T, m, n) if T > 1 else ordinary,
        nearly(*cancelling_pairs(T, m, n)) if T > 1 else ordinary,
        ordinary,
        (torch.zeros(T, m), torch.randn(T, n)),
    ]
    left, right = (torch.stack(side) for side in zip(*examples, strict=True))
    return left * scale, right


def require_bounded(form: Form, budget: int) -> Tensor:
    """Require that no example's released vector exceeds its computed norm. Returns the norms."""
    norms = measured(form, Budget(budget)).sqrt()
    for i in range(form.batch):
        alone = torch.zeros(form.batch, dtype=torch.float64)
        alone[i] = 1
        assert form.weighted_sum(alone).double().norm() <= norms[i] * SLACK + 1e-37
    # Clipped sum of n examples, each of norm at most 1.
    clipped = form.weighted_sum((1 / norms).clamp(max=1))
    assert clipped.double().norm() <= form.batch * SLACK
    return norms


def require_close(norms: Tensor, left: Tensor, right: Tensor) -> None:
    """Require that the bound is as tight as documented: 1e-5, or the rounding of the terms."""
    truth = torch.stack([(a.double().T @ b.double()).norm() for a, b in zip(left, right, strict=True)])
    mass = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    assert (norms >= truth * (1 - 1e-12) - 1e-6 * mass).all()
    assert (norms <= truth * (1 + 1e-4) + 1e-6 * mass + 1e-16).all()


# (T, m, n, bytes that may be kept, bytes in a chunk): each takes another method.
WAYS = {
    "product of norms": (1, 6, 5, PLENTY, PLENTY),
    "Gram": (8, 64, 48, PLENTY, PLENTY),
    "written and kept": (16, 6, 5, PLENTY, PLENTY),
    "written, not kept": (16, 6, 5, 0, PLENTY),
    "written in chunks": (16, 6, 5, 0, 1),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("way", WAYS)
def test_every_method_bounds_the_release(way: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    T, m, n, keep, chunk = WAYS[way]
    monkeypatch.setattr(forms.base, "CHUNK_BYTES", chunk)
    left, right = batch_of(T, m, n, scale)
    outer = Outer(left, right)
    norms = require_bounded(outer, keep)
    if scale > 1e-20:  # below, squares of single entries underflow, and the bound is looser
        require_close(norms, left, right)


def test_each_entry_takes_its_method() -> None:
    """Each entry of WAYS uses the method of its name."""
    for way, (T, m, n, keep, _) in WAYS.items():
        outer = Outer(*batch_of(T, m, n, 1.0))
        measured(outer, Budget(keep))
        assert (outer._written is not None) == (way == "written and kept")
        # Without a written gradient, cancelling examples are formed one by one in float64.
        assert bool(outer._exact) == (way in ("Gram", "written, not kept", "written in chunks"))


@pytest.mark.parametrize("scale", [1.0, 1e15])
def test_the_published_trap(scale: float) -> None:
    """T=256, d=p=512 in float32: the Gram norm of cancelling positions is noise, and can be 0."""
    left, right = batch_of(256, 512, 512, scale)
    gram = torch.einsum("bts,bts->b", left @ left.mT, right @ right.mT)
    mass = (left.norm(dim=2) * right.norm(dim=2)).sum(1)
    assert gram[0] <= 1e-6 * mass[0] ** 2  # in float32 only rounding is left
    require_bounded(Outer(left, right), 0)


def test_a_gram_norm_without_care_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`require_bounded` can fail."""

    def careless(outer: Outer, budget: Budget) -> Tensor:
        gram = torch.einsum("bts,bts->b", outer.left @ outer.left.mT, outer.right @ outer.right.mT)
        return gram.double().clamp_min(0)

    monkeypatch.setattr(Outer, "squared_norms", careless)
    left, right = batch_of(16, 64, 48, 1e15)
    left[0] = left[0, :1] * torch.linspace(1, 2, 16)[:, None]  # no two products round alike
    right[0] = right[0, :1] * (1 / torch.linspace(1, 2, 16)[:, None]) * torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    with pytest.raises(AssertionError):
        require_bounded(Outer(left, right), 0)


@pytest.mark.parametrize("scale", SCALES)
def test_repeated_ids_with_opposite_gradients(scale: float) -> None:
    torch.manual_seed(0)
    g = torch.randn(1, 4, 7)
    g = torch.cat([g, -g, 1e-6 * g[:, :1]], 1) * scale
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0]])
    example = torch.arange(2).repeat_interleave(9)
    rows = Rows(example, torch.cat([ids, ids * 0]).flatten(), torch.cat([g, g]).flatten(0, 1), 2, torch.Size((5, 7)))
    norms = require_bounded(rows, 0)
    truth = torch.stack([rows.instantiate(slice(i, i + 1))[0].double().norm() for i in range(2)])
    assert (norms >= truth).all() and (norms <= truth * 1.001 + 1e-4 * scale * 1e-5 + 1e-17).all()


# Whole models: each loss is linear in the output with weights that cancel over positions.


def _cancelling_weights(out: Tensor) -> Tensor:
    """+w, -w, +w, ... along the positions of [B, T, ...], the same w for every pair."""
    w = torch.linspace(0.5, 2, out[0, 0].numel()).view(out.shape[2:])
    signs = 1 - 2.0 * (torch.arange(out.shape[1]) % 2)
    return signs.view(-1, *[1] * (out.dim() - 2)) * w


class Joined(nn.Module):
    """One weight, used twice on opposite inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 30)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(x), -self.a(x * (1 + 1e-6))], 1)


class Unknown(nn.Module):
    """An operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.w)


class Channels(nn.Module):
    """A convolution with output positions on the axis that `_cancelling_weights` uses."""

    def __init__(self, channels: int, kernels: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, kernels, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).transpose(1, 2)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.zeros(x.shape[:2], dtype=torch.long)) * x[..., :1]


class TiedWords(nn.Module):
    """A tied table; the two parts of its gradient are opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]).expand(x.shape[:2]) % 2
        rows = F.embedding(ids, self.table) * x
        one_hot = F.one_hot(ids, 20).to(x.dtype)
        return torch.stack([rows, -(one_hot @ self.table) * x * (1 + 1e-6)], 1).flatten(1, 2)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(3, 6, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(x.shape[0] * x.shape[1], 4, dtype=torch.long)
        return self.bag(ids).view(*x.shape[:2], 6) * x[..., :1]


class Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


class Remembering(nn.Module):
    """A recurrent layer of one step: its positions are rows, which cancel like those of a linear layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.reshape(1, -1, 6))[0].view(*x.shape[:2], 5)


def _repeated(shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """Examples with equal positions."""
    return lambda: torch.randn(3, 1, *shape[1:]).expand(3, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear written": (lambda: nn.Linear(6, 5), _repeated((16, 6))),
    "linear Gram": (lambda: nn.Linear(64, 48), _repeated((8, 64))),
    "layer norm": (lambda: nn.LayerNorm(6), _repeated((16, 6))),
    "convolution grouped": (lambda: Channels(3, 5, 3), lambda: torch.randn(3, 3, 1).expand(3, 3, 18)),
    "convolution of windows": (lambda: Channels(24, 40, 3), lambda: torch.randn(3, 24, 1).expand(3, 24, 8)),
    "convolution of size 1": (lambda: Channels(3, 5, 1), lambda: torch.randn(3, 3, 1).expand(3, 3, 16)),
    "embedding": (Words, _repeated((16, 6))),
    "joined": (Joined, lambda: torch.randn(3, 40)),
    "tied": (TiedWords, _repeated((16, 12))),
    "embedding bag": (Bags, _repeated((16, 6))),
    "bilinear": (Forms, _repeated((16, 6))),
    "transposed convolution": (
        lambda: nn.Sequential(Transposed(), nn.ConvTranspose1d(6, 5, 1), Transposed()),
        _repeated((16, 6)),
    ),
    **{kind.__name__: (lambda k=kind: Remembering(k), _repeated((16, 6))) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    "unknown": (Unknown, _repeated((16, 6))),
}


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize(
    ("method", "memory"),
    [("bookkeeping", m) for m in ("kept", "not kept", "in chunks")]
    + [(m, "kept") for m in ("reweight", "instantiate", "vmap", "loop")],
)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e15])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_cancelling_positions(
    name: str, scale: float, method: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory != "kept":
        monkeypatch.setattr(examples, "KEEP_BYTES", 0)
    if memory == "in chunks":
        monkeypatch.setattr(forms.base, "CHUNK_BYTES", 1)
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, x = build(), draw()
    clipper = attach(model, PerExample(max_norm=1e-3, parts="tensor", method=method))

    def total(x: Tensor) -> dict[str, Tensor]:
        out = model(x)
        noise = 1 + 1e-6 * torch.linspace(-1, 1, out[0].numel()).view(out.shape[1:])
        return clipper.clipped_sum((out * _cancelling_weights(out) * noise).flatten(1).sum(1) * scale)

    whole = total(x)
    assert all(t.norm() <= 3 * bound.sensitivity * SLACK for bound in clipper.bounds for t in [whole[bound.name]])
    if method in ("vmap", "loop"):
        return  # torch's kernels may sum positions in an order that depends on other examples
    assert excess(clipper, whole, total(x[1:]), Adjacency.ZERO_OUT) <= SLACK
    assert excess(clipper, whole, total(x[:2]), Adjacency.ZERO_OUT) <= SLACK


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_one_gradient_that_cancels_is_no_longer_than_its_norm(name: str) -> None:
    """Compare norms of whole models with the release of one example at a time."""
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, x = build(), draw()
    out = model(x)
    found = per_example_gradients((out * _cancelling_weights(out)).flatten(1).sum(1) * 1e6, trainable(model), Memory())
    norms = {n: s.sqrt() for n, s in found.squared_norms().items()}
    for i in range(3):
        alone = F.one_hot(torch.tensor(i), 3).double()
        for n, released in found.weighted_sums(dict.fromkeys(norms, alone)).items():
            assert released.double().norm() <= norms[n][i] * SLACK, n


# A weight on the loss is not a weight on the gradient: rounding in the backward pass does not commute with it.


class TwoWays(nn.Module):
    """z a b - z c with c = a b rounded to float32, which cancel; and a term that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        z, a = self.w(x)[:, 0], 1.1e8 * (1 + x[:, 0].abs())
        b = 1.01e8 * (1 + x[:, 1].abs())
        return (z * a) * b - z * (a * b) + self.v(x)[:, 0]


def test_reweighted_losses_would_release_more_than_was_measured() -> None:
    """The published method: norms of the losses, then a pass over nu_i loss_i."""
    torch.manual_seed(0)
    model, x = TwoWays(), torch.randn(3, 4)
    bound = 0.37
    squares = per_example_gradients(model(x), trainable(model), Memory()).squared_norms()
    nu = (bound / torch.stack(list(squares.values())).sum(0).sqrt()).clamp(max=1)
    released = torch.autograd.grad((nu.float() * model(x)).sum(), list(model.parameters()))
    assert max(g.norm() for g in released) > 1e3 * 3 * bound


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "instantiate", "vmap", "loop"])
def test_no_method_releases_more_than_it_measured(method: str) -> None:
    torch.manual_seed(0)
    model, x = TwoWays(), torch.randn(3, 4)
    clipper = attach(model, PerExample(max_norm=0.37, method=method))
    whole, rest = (clipper.clipped_sum(model(rows)) for rows in (x, x[1:]))
    assert excess(clipper, whole, rest, Adjacency.ZERO_OUT) <= SLACK
    assert torch.cat([t.flatten() for t in whole.values()]).norm() <= 3 * 0.37 * SLACK
