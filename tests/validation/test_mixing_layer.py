"""`clipwise.check` names the first layer that mixes examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import Batch
from clipwise.validation.check import check

B, D = 6, 5
OUTSIDE = "the loss function, outside of all layers"


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class BatchNormOfItsOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class OneMaskForAll(nn.Module):
    """One dropout mask for the whole batch, with probabilities that depend on its data."""

    def forward(self, x: Tensor) -> Tensor:
        odds = x.detach().abs().mean().clamp(0.1, 0.9)
        return x * (torch.rand(x.shape[1]) < odds) / odds


class PublicMask(nn.Module):
    """One dropout mask for the whole batch, with constant probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[1]) < 0.5)


class Attends(nn.Module):
    """Examples attend to each other. Axis 0 is the time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h_TBd = self.inner(x.unsqueeze(0).expand(3, -1, -1))
        return (torch.softmax(h_TBd @ h_TBd.transpose(1, 2), 2) @ h_TBd).mean(0)


class MixesByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h - h.detach().mean(0))


def model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), layer, nn.Linear(D, 3))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x) @ model(x).T, torch.arange(len(x)), reduction="none")


def over_valid(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y) / (y != 0).sum()


class OverValid(nn.Module):
    """A loss module with a divisor of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)
        self.criterion = nn.CrossEntropyLoss(reduction="none")
        self.scale = Centred()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]] = {
    "x - x.mean(0)": (lambda: model_with(Centred()), cross_entropy, "layer '2' (Centred)"),
    "batch norm": (lambda: model_with(BatchNormOfItsOwn()), cross_entropy, "layer '2' (BatchNormOfItsOwn)"),
    "a mask of the batch": (lambda: model_with(OneMaskForAll()), cross_entropy, "layer '2' (OneMaskForAll)"),
    "time first": (lambda: model_with(Attends()), cross_entropy, "layer '2' (Attends)"),
    "between layers": (MixesByHand, cross_entropy, "the model's own forward (MixesByHand)"),
    "deep inside": (lambda: model_with(nn.Sequential(nn.Tanh(), Centred())), cross_entropy, "layer '2.1'"),
    "contrastive loss": (lambda: model_with(nn.Tanh()), contrastive, OUTSIDE),
    "valid tokens": (lambda: model_with(nn.Tanh()), over_valid, OUTSIDE),
    "a module of the loss": (OverValid, lambda m, x, y: m.scale(m.criterion(m(x), y)), "layer 'scale' (Centred)"),
}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, D), 1 + torch.arange(B) % 2


@pytest.mark.parametrize("name", CASES)
def test_the_first_layer_that_mixes_examples_is_named(name: str) -> None:
    build, loss, words = CASES[name]
    report = check(build(), loss, batch())
    assert len(report.problems) == 1 and f"first mixed in {words}" in report.problems[0], report


def test_shared_random_numbers_are_no_coupling() -> None:
    """The sum is bounded for every mask, and the mask does not depend on the data."""
    assert check(model_with(PublicMask()), cross_entropy, batch())


def test_nothing_is_left_on_the_model() -> None:
    model = model_with(Centred())
    assert not check(model, cross_entropy, batch())
    assert not any(m._forward_hooks for m in model.modules())


def test_batch_clipping_accepts_mixed_examples() -> None:
    assert check(model_with(Centred()), cross_entropy, batch(), clipping=Batch(1.0))
