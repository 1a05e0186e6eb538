"""Models and losses with coupled examples, and uncoupled ones that look similar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, D, WORDS = 8, 6, 5, 11

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """`build` returns the model and `draw` a batch; the losses are `loss(model, x, y)`."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    draw: Callable[[], Batch]


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def vectors() -> Batch:
    return torch.randn(B, D), torch.arange(B) % 3


def padded() -> Batch:
    """Ids with 0 at the end of some rows."""
    x = torch.randint(1, WORDS, (B, T))
    for row in range(0, B, 3):
        x[row, T // 2 :] = 0
    return x, torch.arange(B) % 3


def perceptron(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), *between, nn.Tanh(), nn.Linear(8, 3))


class Words(nn.Module):
    """Attention over the words of a text, causal if `is_causal(padding)` is true."""

    def __init__(self, is_causal: Callable[[Tensor], bool] = lambda is_padding: False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)
        self._is_causal = is_causal

    def forward(self, x_BT: Tensor) -> Tensor:
        h, is_padding = self.words(x_BT), x_BT == 0
        h = F.scaled_dot_product_attention(h, h, h, is_causal=self._is_causal(is_padding))
        return self.head(h.masked_fill(is_padding[..., None], 0.0).sum(1))


class Equilibrium(nn.Module):
    """Iterates until the whole batch has converged."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(D, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.again.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        z, entered = torch.zeros(len(x), 8), self.enter(x)
        for _ in range(50):
            after = torch.tanh(self.again(z) + entered)
            is_done = bool((after - z).detach().abs().max() < 1e-2)
            z = after
            if is_done:
                break
        return self.head(z)


class ByPlace(nn.Module):
    """Adds the index in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(D, 3), nn.Parameter(torch.randn(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.places[: len(x)]


class Gated(nn.Module):
    """A detached mean of the batch behind a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate, self.head = nn.Linear(D, 8), nn.Parameter(torch.zeros(())), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(h + self.gate * h.detach().mean(0))


def zero_head() -> nn.Module:
    """A batch mean behind a head that starts at zero: no loss and no input gradient shows it."""

    class Centred(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h - h.mean(0)

    model = nn.Sequential(nn.Linear(D, 8), Centred(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    return model


def scaled_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Correct losses with gradients scaled by a batch mean."""
    losses = losses_of(model, x, y)
    return losses.detach() + x.square().mean().item() * (losses - losses.detach())


def hard_examples(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = losses_of(model, x, y)
    least = losses.detach().sort().values[len(losses) // 2]
    return losses * (losses.detach() >= least)


def normalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Bytes of images, normalised over the batch."""
    numbers = (40 * x).clamp(-128, 127).to(torch.int8).float()
    return losses_of(model, (numbers - numbers.mean()) / (numbers.std() + 1), y)


def with_frozen_backbone() -> Callable[..., Tensor]:
    """A backbone outside of the model, with batch norm in training mode."""
    backbone = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            features = backbone(x)
        return losses_of(model, features, y)

    return loss


COUPLED: dict[str, Case] = {
    "causal if any is padded": Case(lambda: Words(lambda is_padding: bool(is_padding.any())), losses_of, padded),
    "a loop until all have converged": Case(Equilibrium, losses_of, vectors),
    "the index in the batch": Case(ByPlace, losses_of, vectors),
    "a gate at zero": Case(Gated, losses_of, vectors),
    "a head at zero": Case(zero_head, losses_of, vectors),
    "scaled gradients": Case(perceptron, scaled_gradients, vectors),
    "hard examples": Case(perceptron, hard_examples, vectors),
    "bytes normalised over the batch": Case(perceptron, normalised, vectors),
    "a backbone with batch norm": Case(perceptron, with_frozen_backbone(), vectors),
    "the number of examples": Case(perceptron, lambda m, x, y: losses_of(m, x, y) / len(x), vectors),
    "mixup": Case(
        perceptron, lambda m, x, y: losses_of(m, 0.7 * x + 0.3 * x[torch.randperm(len(x))].detach(), y), vectors
    ),
}


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return losses_of(model, x, y)


class Reordered(nn.Linear):
    """Sums in another order for another batch size, as kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(self.in_features).roll(len(x))
        products = (x[:, order, None] * self.weight[:, order].T).unbind(1)
        return reduce(torch.add, products) + self.bias


def large_logits() -> nn.Module:
    """Losses that are small compared with the logits and their rounding."""
    model = nn.Sequential(Reordered(D, 64), nn.Tanh(), Reordered(64, 64), nn.Tanh(), Reordered(64, 3))
    with torch.no_grad():
        model[4].weight += 300.0  # for all classes
    return model


def deep() -> nn.Module:
    layers = [m for _ in range(20) for m in (Reordered(32, 32), nn.ReLU())]
    return nn.Sequential(Reordered(D, 32), *layers, Reordered(32, 3))


def small_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Near 0 for every example."""
    outputs = model(x)
    return (outputs.logsumexp(1) - outputs.mean(1) - 1.0986).square()


class Packed(nn.Module):
    """Dropout of valid words only: the number of draws depends on the padding of all texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, x_BT: Tensor) -> Tensor:
        is_word = x_BT != 0
        h_N = F.dropout(self.words(x_BT[is_word]), 0.5, self.training)
        h = torch.zeros(*x_BT.shape, 8).masked_scatter(is_word[..., None], h_N)
        return self.head(h.sum(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = (nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3))

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(x_BT))[0][:, -1])


def without_the_batch_axis(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A single example loses its axis."""
    return model(x)[:, 0].squeeze() ** 2


APART: dict[str, Case] = {
    "perceptron": Case(perceptron, losses_of, vectors),
    "dropout": Case(lambda: perceptron(nn.Dropout(0.5)), losses_of, vectors),
    "deep": Case(deep, losses_of, vectors),
    "attention": Case(Words, losses_of, padded),
    "causal for each": Case(lambda: Words(lambda is_padding: True), losses_of, padded),
    "recurrent": Case(Recurrent, losses_of, padded),
    "packed dropout": Case(Packed, losses_of, padded),
    "autocast": Case(perceptron, under_autocast, vectors),
    "bfloat16": Case(lambda: perceptron().bfloat16(), lambda m, x, y: losses_of(m, x.bfloat16(), y), vectors),
    "float64": Case(lambda: perceptron().double(), lambda m, x, y: losses_of(m, x.double(), y), vectors),
    "deep, in bfloat16": Case(lambda: deep().bfloat16(), lambda m, x, y: losses_of(m, x.bfloat16(), y), vectors),
    "large logits": Case(large_logits, losses_of, vectors),
    "losses near zero": Case(large_logits, small_losses, vectors),
    "no axis for a single example": Case(perceptron, without_the_batch_axis, vectors),
    "numbers of numpy": Case(perceptron, lambda m, x, y: losses_of(m, x, y) * _numpy_factor(), vectors),
    "a generator of its own": Case(
        perceptron, lambda m, x, y: losses_of(m, x + 0.1 * torch.randn(x.shape, generator=_OWN), y), vectors
    ),
}

_OWN = torch.Generator().manual_seed(0)


def _numpy_factor() -> float:
    import numpy as np

    return float(np.random.uniform(0.5, 1.5))


def as_mapping(batch: Any) -> dict[str, Tensor]:
    return dict(zip("xy", batch, strict=True))
