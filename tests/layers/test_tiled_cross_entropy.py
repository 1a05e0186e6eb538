"""An output layer with cross entropy, in tiles: losses, gradients, norms and sums, with a tied table as well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.errors import ConfigurationError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.forms import Head, head
from clipwise.layers import linear_cross_entropy
from tests.sites import site

V, D, T, B = 37, 6, 9, 5


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_WORDS", 8)
    monkeypatch.setattr(head, "TILE_BYTES", 4000)
    monkeypatch.setattr("clipwise.layers.tiled_cross_entropy._width", lambda positions: 10)


class Language(nn.Module):
    def __init__(self, tied: bool, bias: bool, tiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.weight = None if tied else nn.Parameter(torch.randn(V, D))
        self.bias = nn.Parameter(torch.randn(V)) if bias else None
        self.tiled = tiled

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.table(ids)))
        weight = self.table.weight if self.weight is None else self.weight
        if self.tiled:
            return linear_cross_entropy(x, weight, targets, self.bias)
        logits = F.linear(x, weight, self.bias)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def batch(ignored: bool = True) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(V, (B, T), generator=random) for _ in range(2))
    if ignored:
        targets[1, 2:5] = -100
    return ids, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_plain_gradients(tied: bool, bias: bool, dtype: torch.dtype) -> None:
    ours, plain = (Language(tied, bias, tiled).to(dtype) for tiled in (True, False))
    losses, expected = ours(*batch()), plain(*batch())
    torch.testing.assert_close(losses, expected)
    weights = torch.rand(B, T, dtype=dtype)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "instantiate"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_norms_and_sums(tied: bool, bias: bool, method: str) -> None:
    ours, plain = (Language(tied, bias, tiled).double() for tiled in (True, False))
    rows = batch()
    alone = [
        torch.autograd.grad(plain(*(t[i : i + 1] for t in rows)).sum(), list(plain.parameters())) for i in range(B)
    ]
    memory, w_B = Memory(), torch.rand(B, dtype=torch.float64)
    for _ in range(3):  # the first passes compare rules with autograd
        found = per_example_gradients(ours(*rows).sum(1), dict(ours.named_parameters()), memory, method)
        squares = found.squared_norms()
        sums = found.weighted_sums(dict.fromkeys(squares, w_B))
    for (name, _), each in zip(ours.named_parameters(), zip(*alone, strict=True), strict=True):
        truth = torch.stack(each)
        torch.testing.assert_close(squares[name], truth.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(sums[name], torch.tensordot(w_B, truth, 1), rtol=1e-8, atol=1e-10)


def test_no_gradient_of_the_table_is_written_out() -> None:
    model = Language(tied=True, bias=False, tiled=True)
    memory = Memory()
    for _ in range(2):
        found = per_example_gradients(model(*batch()).sum(1), dict(model.named_parameters()), memory, "bookkeeping")
        found.squared_norms()
    assert isinstance(found.by_parameter["table.weight"].form, Head)


@pytest.mark.parametrize("remainder", [0.0, 1e-7, 1e-4, 1.0])
def test_the_part_of_an_example_whose_positions_cancel_is_at_most_its_bound(remainder: float) -> None:
    """Inputs of opposite signs, with logits from the bias alone."""
    torch.manual_seed(0)
    words = head.Words(1e-12 * torch.randn(V, D), torch.randn(V), torch.float32)
    x = 1e3 * torch.randn(3, 1, D).expand(3, T - 1, D) * (1 - 2.0 * (torch.arange(T - 1) % 2))[:, None]
    x = x * (1 + remainder * torch.randn(3, T - 1, 1))
    target = torch.full((3, T - 1), 4)
    lse = words.bias.logsumexp(0).expand(3, T - 1)
    form = Head(words, x, lse, target, torch.ones(3, T - 1))
    square_B = form.squared_norms(budget := head.Budget(2**30))
    form.tighten(square_B, budget)
    truth = torch.stack([form._in_float64(i) for i in range(3)]).flatten(1).norm(dim=1)
    assert (square_B.sqrt() >= truth * (1 - 1e-12)).all()
    for i in range(3):
        alone = F.one_hot(torch.tensor(i), 3).double()
        assert form.weighted_sum(alone).double().norm() <= square_B[i].sqrt() * (1 + 1e-5) + 1e-30


def test_a_tile_that_differs_the_second_time_is_left_out() -> None:
    torch.manual_seed(0)
    words = head.Words(torch.randn(V, D), None, torch.float32)
    x, target = torch.randn(B, T, D), torch.randint(V, (B, T))
    form = Head(words, x, (x @ words.weight.T).logsumexp(-1), target, torch.ones(B, T))
    form.squared_norms(head.Budget(2**30))
    whole = form.weighted_sum(torch.ones(B))
    form._x = x.clone()
    form._x[2] *= 1.001
    without = torch.ones(B)
    without[2] = 0
    torch.testing.assert_close(form.weighted_sum(torch.ones(B)), form.weighted_sum(without))
    assert not torch.allclose(form.weighted_sum(torch.ones(B)), whole)


def test_a_record_that_is_not_finite_contributes_zero() -> None:
    class Scaled(Language):
        def forward(self, ids: Tensor, targets: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            x = self.inner(self.table(ids)) * scale[:, None, None]
            return linear_cross_entropy(x, self.table.weight, targets)

    model = Scaled(tied=True, bias=False, tiled=True)
    clipper = PerExample(0.5).attach(site(model))
    scale = torch.ones(B)
    for _ in range(3):
        total = clipper.clipped_sum(model(*batch(), scale).sum(1))
    scale[3] = torch.nan
    total = clipper.clipped_sum(model(*batch(), scale).sum(1))
    assert all(torch.isfinite(t).all() for t in total.values())


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one class for each position"):
        linear_cross_entropy(torch.zeros(2, 3, D), torch.zeros(V, D), torch.zeros(2, dtype=torch.long))
