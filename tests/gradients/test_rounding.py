"""Kernels with a nondeterministic order of sums, in bfloat16: no false alarm, and coupling is detected.

The behaviour of such a GPU kernel is simulated on the CPU: some sums differ in their last digits, and are then rounded
to bfloat16 up in one pass and down in another.
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
    """The identity, with a backward pass that changes digits below bfloat16's, for some examples in some passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        moved_B = torch.rand(len(g)).lt(0.7).to(g).view(-1, *[1] * (g.dim() - 1))
        return g * (1 + 2.0**-11 * torch.randn_like(g) * moved_B)


class Layered(nn.Module):
    """Layers of attention under autocast, with `leak` times the batch's mean subtracted after the first."""

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


@pytest.mark.slow
@pytest.mark.parametrize("layers", [12, 24])
def test_another_order_of_sums_is_not_coupling(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert any(rounded)  # a fixed tolerance alone would refuse the model


@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize("leak", [1.0, 0.1, 0.01])
def test_coupling_is_still_detected(leak: float, size: int) -> None:
    for seed in range(3):
        with pytest.raises(CoupledExamplesError):
            examine(Layered(12, leak), batch(size, seed))


@pytest.mark.slow
def test_one_way_coupling_is_detected_for_any_weights() -> None:
    """The second example contains a hundredth of the first: visible if the second loss has the larger weight."""

    class OneWay(Layered):
        def forward(self, ids: Tensor) -> Tensor:
            losses = super().forward(ids)
            return losses + 0.01 * torch.stack([0 * losses[0], losses[0]])

    for seed in range(8):
        with pytest.raises(CoupledExamplesError):
            examine(OneWay(12), batch(2, seed))


def test_weights_are_as_far_apart_as_possible() -> None:
    for size in (2, 3, 7, 13):
        weights_B = probe_weights(size, torch.ones(()))
        assert float(weights_B.max() / weights_B.min()) == 2.0**12
        assert len(set(weights_B.tolist())) == size


@pytest.mark.parametrize("off", [0.02, 0.2])
def test_the_allowed_error_is_a_multiple_of_the_measured_rounding(off: float) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(4, 50, generator=generator)
    weights_B = probe_weights(4, plain)
    weighted = weights_B[:, None] * plain * (1 + off * torch.randn(4, 50, generator=generator))
    thrice = 3 * plain * (1 + 0.01 * torch.randn(4, 50, generator=generator))
    layout = Layout(0, 1, 4, 1)
    assert not Probe(plain, weighted, weights_B).agrees(layout)
    assert Probe(plain, weighted, weights_B, thrice).agrees(layout) == (off < 0.1)
