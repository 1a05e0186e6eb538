"""Backpropagation clipping in whole networks and the engine: one record moves the sum by at most the stated
sensitivity, and reaches it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Adjacency, Backprop, layers, make_private
from clipwise.noise.key import NoiseKey
from tests.sites import site
from tests.soundness.neighbours import DISTORTIONS, FACTORS, Batch, distance, excess

EXAMPLES = 6


class Residual(nn.Module):
    """Residual branches, normalization, attention, and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        y: Tensor = self.last(x.mean(1))
        return y


class Words(nn.Module):
    """Ids, a recurrent layer, and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.run, self.last = nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        _, (h, _) = self.run(self.table(ids) * x[:, :1, None])
        y: Tensor = self.last(h[-1])
        return y


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.shared(self.shared(x).tanh()).tanh())
        return y


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], dict[str, Any]]] = {
    "images": (images, lambda: (torch.randn(EXAMPLES, 2, 6, 6),), {}),
    "residual": (Residual, lambda: (torch.randn(EXAMPLES, 4, 5),), {}),
    "words": (Words, lambda: (torch.randint(0, 7, (EXAMPLES, 4)), torch.randn(EXAMPLES, 2)), {}),
    "twice": (Twice, lambda: (torch.randn(EXAMPLES, 5),), {"uses": {"shared": 2}}),
}
WAYS = [("clip", "upstream"), ("clip", "gradient"), ("normalize", "upstream"), ("normalize", "gradient")]


def network(name: str, mode: str, bound: str) -> nn.Module:
    torch.manual_seed(1)
    build, _, options = NETWORKS[name]
    return layers.clip_inputs(build(), input_norm=2.0, grad_norm=0.5, mode=mode, bound=bound, **options)


def batch(name: str) -> Batch:
    torch.manual_seed(2)
    return Batch(NETWORKS[name][1](), torch.ones(EXAMPLES))


def losses(model: nn.Module, of: Batch) -> Tensor:
    return model(*of.inputs).logsumexp(1) * of.factors


@pytest.mark.parametrize(("mode", "bound"), WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_example_moves_the_sum_within_the_bound(name: str, mode: str, bound: str) -> None:
    model = network(name, mode, bound)
    clipper = Backprop().attach(site(model))
    plain = batch(name)
    for distortion in DISTORTIONS:
        for factor in FACTORS if distortion == "none" else (1e6,):
            worse = plain.distorted(3, distortion, factor)
            one = clipper.clipped_sum(losses(model, worse))
            other = clipper.clipped_sum(losses(model, worse.without(3)))
            # Float32 sums of a few examples; a sum of B moves by B 2^-24 of the bound.
            assert excess(clipper, one, other, Adjacency.ZERO_OUT) <= 1 + 1e-6, (distortion, factor)


def test_replacing_a_record_moves_the_sum_by_nearly_twice_the_bound() -> None:
    """Two records that pull a linear layer in opposite directions."""
    model = layers.clip_inputs(nn.Linear(4, 2), input_norm=2.0, grad_norm=0.5)
    clipper = Backprop().attach(site(model, Adjacency.REPLACE_ONE))
    assert [b.sensitivity for b in clipper.bounds] == [2.0, 1.0]
    x = torch.full((1, 4), 30.0)
    sums = [clipper.clipped_sum(model(x)[:, 0] * factor) for factor in (100.0, -100.0)]
    for b in clipper.bounds:
        moved = distance({n: sums[0][n] for n in b.parameters}, {n: sums[1][n] for n in b.parameters})
        assert 0.997 * b.sensitivity < moved <= b.sensitivity


DRAWS = [
    ("poisson", "zero-out", 1.0),
    ("fixed-size", "replace-one", 2.0),
    ("shuffled", "zero-out", 1.0),
    ("shuffled", "replace-one", 2.0),
    ("full", "replace-one", 2.0),
]


@pytest.mark.parametrize(("sampling", "adjacency", "factor"), DRAWS)
@pytest.mark.parametrize("mode", ["clip", "normalize"])
def test_through_the_engine(sampling: str, adjacency: str, factor: float, mode: str) -> None:
    """One step without noise on two data sets that differ in one record, from the same weights and draw."""

    def released(factors: Tensor) -> tuple[dict[str, Tensor], Any, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        layers.clip_inputs(model, input_norm=1.0, grad_norm=0.5, mode=mode)
        size: dict[str, Any] = {} if sampling == "full" else {"batch_size": 10}
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), 1.0),
            TensorDataset(x, factors, torch.arange(20)),
            clipping=Backprop(1.0, 0.5, mode),
            noise_multiplier=0,
            sampling=sampling,
            adjacency=adjacency,
            **size,
        )
        private._context.keys.key = NoiseKey.from_seed(3, b"the same draws")
        rows, weight, ids = next(iter(private.loader))
        private.backward((model(rows) * torch.tensor([1.0, -1.0, 1.0])).sum(1) * weight)
        sums = {n: p.grad.double() * private.divisor for n, p in model.named_parameters() if p.grad is not None}
        return sums, private, int(ids[0])

    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(3))
    factors = torch.ones(20)
    _, _, drawn = released(factors)
    factors[drawn] = 1e4
    one, private, _ = released(factors)
    factors[drawn] = -1e4
    two, _, _ = released(factors)
    bound, reach = 0.5, []  # C1 C2, and C2
    for part in private.parts():
        moved = distance({n: one[n] for n in part.parameters}, {n: two[n] for n in part.parameters})
        assert math.isclose(part.sensitivity, factor * bound)
        # Both records are present: they differ by at most twice the bound of one.
        assert moved <= 2 * bound * (1 + 1e-6)
        reach.append(moved / bound)
    assert max(reach) > 1.99
