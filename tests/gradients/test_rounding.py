"""Kernels that add in an order that changes, in bfloat16: no coupling, and coupling is still found.

What such a kernel does on a GPU is done here on the CPU: some sums come out otherwise in their last digits, and what is
rounded to bfloat16 after them then goes up in one pass and down in another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.errors import CoupledExamplesError
from clipwise.gradients import Memory, per_example_gradients
from clipwise.gradients.layout import Layout, Probe, probe_weights, surviving
from clipwise.validation import coupling
from clipwise.validation.coupling import IndependenceProbe

T, D = 16, 24


class Unordered(torch.autograd.Function):
    """The identity, whose backward pass moves digits that bfloat16 has not: of some examples, in some passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        moved_B = torch.rand(len(g)).lt(0.7).to(g).view(-1, *[1] * (g.dim() - 1))
        return g * (1 + 2.0**-11 * torch.randn_like(g) * moved_B)


class Layered(nn.Module):
    """Layers of attention under autocast, with `leak` times the batch's mean taken off after the first."""

    def __init__(self, layers: int, leak: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leak = leak
        self.tokens = nn.Embedding(7, D)
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(D, D) for _ in range(layers)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.tokens(ids)
            for number, (q, k, v, norm) in enumerate(zip(self.q, self.k, self.v, self.norms, strict=True)):
                h = Unordered.apply(norm(x))
                scores = q(h) @ k(h).mT / D**0.5
                x = F.gelu(v(h) + scores.softmax(-1).to(torch.bfloat16) @ v(h))
                if number == 0 and self.leak:
                    x = x - self.leak * x.mean(0)
        return x.float().square().mean((1, 2))


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "repeats", False)


def batch(size: int, seed: int) -> Tensor:
    return torch.randint(0, 7, (size, T), generator=torch.Generator().manual_seed(seed))


def examine(model: nn.Module, ids: Tensor) -> None:
    probe = IndependenceProbe()
    probe.mark(ids)
    probe.examine(model(ids))


@pytest.mark.parametrize("layers", [12, 24])
def test_another_order_of_sums_is_no_coupling(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[bool] = []

    def noted(probes: list[Probe]) -> list[Layout]:
        rounded.append(probes[0].thrice is not None)
        return surviving(probes)

    monkeypatch.setattr(coupling, "surviving", noted)
    model = Layered(layers)
    for seed, size in enumerate((2, 3, 8, 16)):
        ids = batch(size, seed)
        examine(model, ids)
        per_example_gradients(model(ids), dict(model.named_parameters()), Memory()).squared_norms()
    assert any(rounded)  # with a fixed tolerance alone it would be refused


@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize("leak", [1.0, 0.1, 0.01])
def test_coupling_is_found_in_spite_of_it(leak: float, size: int) -> None:
    for seed in range(3):
        with pytest.raises(CoupledExamplesError):
            examine(Layered(12, leak), batch(size, seed))


def test_an_example_that_only_gives_is_found_whatever_the_weights() -> None:
    """The second example takes a hundredth of the first: seen where the second one's loss has the larger weight."""

    class OneWay(Layered):
        def forward(self, ids: Tensor) -> Tensor:
            losses = super().forward(ids)
            return losses + 0.01 * torch.stack([0 * losses[0], losses[0]])

    for seed in range(8):
        with pytest.raises(CoupledExamplesError):
            examine(OneWay(12), batch(2, seed))


def test_weights_are_as_far_apart_as_can_be() -> None:
    for size in (2, 3, 7, 13):
        weights_B = probe_weights(size, torch.ones(()))
        assert float(weights_B.max() / weights_B.min()) == 2.0**12
        assert len(set(weights_B.tolist())) == size


@pytest.mark.parametrize("off", [0.02, 0.2])
def test_rows_may_be_off_by_a_few_times_what_three_times_the_losses_show(off: float) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(4, 50, generator=generator)
    weights_B = probe_weights(4, plain)
    weighted = weights_B[:, None] * plain * (1 + off * torch.randn(4, 50, generator=generator))
    thrice = 3 * plain * (1 + 0.01 * torch.randn(4, 50, generator=generator))
    layout = Layout(0, 1, 4, 1)
    assert not Probe(plain, weighted, weights_B).agrees(layout)
    assert Probe(plain, weighted, weights_B, thrice).agrees(layout) == (off < 0.1)
