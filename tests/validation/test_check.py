"""`clipwise.check` reports what training would refuse, and finds coupling that no gradient shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.layers import clip_inputs
from clipwise.validation.check import check
from tests.gradients.cases import Centers

B, D = 6, 5


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


def vectors() -> tuple[Tensor, ...]:
    return torch.randn(B, D), torch.arange(B) % 3


def perceptron(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), *between, nn.Tanh(), nn.Linear(8, 3))


class Language(nn.Module):
    """Words and positions, an encoder with dropout, a head over every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(4, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(x) + self.places))


def tokens() -> tuple[Tensor, ...]:
    x = torch.randint(1, 11, (B, 4))
    x[0, 2:] = 0  # padding
    return x, x.roll(-1, 1)


def token_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss per token, 0 at padding."""
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none", ignore_index=0)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[], tuple[Any, ...]]]

ACCEPTED: dict[str, Case] = {
    "perceptron": (perceptron, cross_entropy, vectors),
    "dropout": (lambda: perceptron(nn.Dropout(0.5)), cross_entropy, vectors),
    "frozen batch norm": (lambda: perceptron(nn.BatchNorm1d(8).eval()), cross_entropy, vectors),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        squares,
        lambda: (torch.randn(B, 2, 4, 4),),
    ),
    "language": (Language, lambda m, x, y: token_losses(m, x, y).sum(1), tokens),
    "language, own number of tokens": (
        Language,
        lambda m, x, y: token_losses(m, x, y).sum(1) / (y != 0).sum(1),
        tokens,
    ),
    "a constant of the task": (perceptron, lambda m, x, y: cross_entropy(m, x, y) / 256, vectors),
    "weights of the examples": (perceptron, lambda m, x, y: cross_entropy(m, x, y) * (1 + y), vectors),
    "a batch in a dictionary": (
        perceptron,
        lambda m, b: cross_entropy(m, b["x"], b["y"]),
        lambda: (dict(zip("xy", vectors(), strict=True)),),
    ),
}


def _centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


REFUSED: dict[str, tuple[Case, str]] = {
    "batch norm": ((lambda: perceptron(nn.BatchNorm1d(8)), cross_entropy, vectors), "BatchNorm1d"),
    "functional batch norm": (
        (
            perceptron,
            lambda m, x, y: F.cross_entropy(F.batch_norm(m(x), None, None, training=True), y, reduction="none"),
            vectors,
        ),
        "depends",
    ),
    "inputs minus their mean": ((perceptron, lambda m, x, y: cross_entropy(m, _centred(x), y), vectors), "depends"),
    "contrastive": (
        (perceptron, lambda m, x, y: F.cross_entropy(m(x) @ m(x).T, torch.arange(len(x)), reduction="none"), vectors),
        "depends",
    ),
    "sorted": ((perceptron, lambda m, x, y: cross_entropy(m, x, y).sort()[0], vectors), "depends"),
    "words minus their mean": (
        (Language, lambda m, x, y: _centred(m.words(x)).square().sum((1, 2)) + token_losses(m, x, y).sum(1), tokens),
        "depends",
    ),
    # Coupling that no gradient shows:
    "all valid tokens": (
        (Language, lambda m, x, y: token_losses(m, x, y).sum(1) / (y != 0).sum(), tokens),
        "its own count",
    ),
    "a detached scale of the batch": (
        (perceptron, lambda m, x, y: cross_entropy(m, x, y) / cross_entropy(m, x, y).mean().detach(), vectors),
        "was replaced",
    ),
    "class counts of the batch": (
        (perceptron, lambda m, x, y: cross_entropy(m, x, y) / torch.bincount(y, minlength=3)[y], vectors),
        "was replaced",
    ),
    "the number of examples": (
        (perceptron, lambda m, x, y: cross_entropy(m, x, y) / len(x), vectors),
        "removed from the batch",
    ),
    "the number of examples, with dropout": (
        (lambda: perceptron(nn.Dropout(0.5)), lambda m, x, y: cross_entropy(m, x, y) / len(x), vectors),
        "removed from the batch",
    ),
    # Refused by the first step:
    "a mean": ((perceptron, lambda m, x, y: cross_entropy(m, x, y).mean(), vectors), "single number"),
    "one loss per token": ((Language, token_losses, tokens), "2 dimensions"),
    "no gradient": ((perceptron, lambda m, x, y: cross_entropy(m, x, y).detach(), vectors), "no gradient"),
    "nothing to train": (
        (lambda: perceptron().requires_grad_(False), cross_entropy, vectors),
        "no trainable parameter",
    ),
    "a forgotten parameter": (
        (lambda: nn.Sequential(nn.Linear(D, 3), nn.Linear(3, 3)), lambda m, x, y: cross_entropy(m[0], x, y), vectors),
        "'1.weight'",
    ),
}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)


REFUSED["a buffer that forward updates"] = ((Counting, cross_entropy, vectors), "'seen'")


def report_on(case: Case) -> Any:
    torch.manual_seed(0)
    build, loss, draw = case
    return check(build(), loss, draw())


@pytest.mark.parametrize("name", ACCEPTED)
def test_uncoupled_losses_are_accepted(name: str) -> None:
    report = report_on(ACCEPTED[name])
    assert report.ok, report
    assert report and not report.notes
    assert "Accepted" in str(report)


@pytest.mark.parametrize("name", REFUSED)
def test_coupled_or_invalid_losses_are_refused(name: str) -> None:
    case, words = REFUSED[name]
    report = report_on(case)
    assert not report.ok and not report
    assert len(report.problems) == 1 and words in report.problems[0], report
    assert "Refused" in str(report)


def test_a_slow_operation_is_a_note() -> None:
    report = report_on((Centers, squares, lambda: (torch.randn(B, 2, 5),)))
    assert report.ok and "SquaredDistanceBackward" in report.notes[0]


def test_losses_that_are_always_random_are_accepted_with_a_note() -> None:
    noisy = (perceptron, lambda m, x, y: F.cross_entropy(F.dropout(m(x)), y, reduction="none"), vectors)
    report = report_on(noisy)
    assert report.ok and "random" in report.notes[0]


def test_clipped_layers_are_checked_for_backpropagation_clipping() -> None:
    """By default, without `clipping=`. Per-example clipping would accept either model."""
    for mode in ("clip", "normalize"):
        clipped = clip_inputs(perceptron(), input_norm=1.0, grad_norm=1.0, mode=mode)
        assert check(clipped, cross_entropy, vectors()).ok
        penalized = check(clipped, lambda m, x, y: cross_entropy(m, x, y) + m[0].layer.weight.square().sum(), vectors())
        assert not penalized.ok and "outside of its clipped layer" in str(penalized)
    partly = nn.Sequential(clip_inputs(nn.Linear(D, 8), input_norm=1.0, grad_norm=1.0), nn.Linear(8, 3))
    assert "in no clipped layer" in str(check(partly, cross_entropy, vectors()))


def test_the_model_is_unchanged() -> None:
    model = perceptron(nn.Dropout(0.5), nn.BatchNorm1d(8).eval())
    modes = [m.training for m in model.modules()]
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x, y = torch.randn(B, D), torch.arange(B) % 3
    torch.set_rng_state(before)
    assert check(model, cross_entropy, (x, y))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_no_message_carries_a_value_of_the_data() -> None:
    for case, _ in REFUSED.values():
        for problem in report_on(case).problems:
            assert str(B) not in problem.replace("GPT-2", "")


@pytest.mark.parametrize("batch", [(), (torch.randn(1, D),), (torch.tensor(3.0),), ("text",)])
def test_a_batch_of_fewer_than_two_examples_is_refused(batch: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least two examples"):
        check(perceptron(), squares, batch)


@pytest.mark.parametrize("loss", [len, lambda model, x, y: x, lambda x: x])
def test_a_loss_that_does_not_take_the_batch_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"called as loss\(model, \*batch\), here with 2 arguments"):
        check(perceptron(), loss, (torch.randn(4, D),))


def test_errors_inside_a_loss_are_not_replaced() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return len(x, x)  # type: ignore[call-arg, return-value]

    with pytest.raises(TypeError, match="len"):
        check(perceptron(), loss, (torch.randn(4, D),))
