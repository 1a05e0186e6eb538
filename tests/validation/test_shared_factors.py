"""Per-example strategies refuse losses that are scaled by a number of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import Backprop, Lipschitz, PerExample, layers
from clipwise.clipping import Strategy
from clipwise.errors import CoupledExamplesError
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.shared_factors import SharedFactors
from tests.runs import network, private_run

DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda losses: losses / len(losses),
    "by a size": lambda losses: torch.div(losses, losses.shape[0]),
    "multiplied": lambda losses: (1 / len(losses)) * losses,
    "the other way": lambda losses: losses * len(losses),
    "further in": lambda losses: 3.0 * (losses / len(losses)) + 1.0,
}
CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda losses: losses,
    "one size": lambda losses: losses / 4,
    "another": lambda losses: losses / 7,
    "positions": lambda losses: losses / 4 * 0.25,
}


def losses_of(size: int) -> Tensor:
    torch.manual_seed(size)
    return F.cross_entropy(nn.Linear(5, 3)(torch.randn(size, 5)), torch.zeros(size).long(), reduction="none")


@pytest.mark.parametrize("how", DIVIDED)
def test_a_factor_that_follows_the_batch_size_is_refused(how: str) -> None:
    lint = SharedFactors()
    for size in (4, 4):
        lint.examine(DIVIDED[how](losses_of(size)), [])
    with pytest.raises(CoupledExamplesError, match="Remove the division"):
        lint.examine(DIVIDED[how](losses_of(6)), [])
    lint.examine(DIVIDED[how](losses_of(4)), [])
    with pytest.raises(CoupledExamplesError):  # also on the next try
        lint.examine(DIVIDED[how](losses_of(7)), [])


@pytest.mark.parametrize("how", CONSTANT)
def test_constants_are_accepted(how: str) -> None:
    lint = SharedFactors()
    for size in (4, 7, 4, 9, 2):
        lint.examine(CONSTANT[how](losses_of(size)), [])


STRATEGIES: dict[str, Callable[[], tuple[nn.Module, Strategy]]] = {
    "per example": lambda: (network(), PerExample(1.0)),
    "backprop": lambda: (layers.clip_inputs(network(), input_norm=1.0), Backprop()),
    "lipschitz": lambda: (nn.Sequential(layers.ClipInput(1.0), network()), Lipschitz(1.0, 1.0)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_refuses_division_by_the_batch_size(strategy: str) -> None:
    model, clipping = STRATEGIES[strategy]()
    _, private = private_run(model, clipping=clipping)
    with pytest.raises(CoupledExamplesError, match="Remove the division"):
        for _ in range(20):
            for x, y in private.loader:
                outputs = model(x)
                losses = F.cross_entropy(outputs, y, reduction="none") / len(x)
                private.step(losses, outputs=outputs)


# Numbers of the batch that are not its size

T, VOCABULARY = 5, 6
TABLE = nn.Embedding(VOCABULARY, VOCABULARY)
WEIGHTS = torch.tensor([0.3, 1.7, 1.0, 0.2, 2.0, 0.7])


def token_losses(ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(TABLE(ids_BT).transpose(1, 2), labels_BT, reduction="none")


def draw(size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(size)
    ids_BT = torch.randint(0, VOCABULARY, (size, T), generator=random)
    valid_BT = torch.rand(size, T, generator=random) < 0.7
    return ids_BT, torch.where(valid_BT, ids_BT, -100)


def means(labels_BT: Tensor) -> Tensor:
    return (labels_BT != -100).sum(1).clamp(min=1)


Tokens = Callable[[Tensor, Tensor], Tensor]  # token losses and labels to losses
SHARED: dict[str, Tokens] = {
    "valid tokens": lambda t, y: t.sum(1) / (y != -100).sum(),
    "before the sum": lambda t, y: (t / (y != -100).sum()).sum(1),
    "flat": lambda t, y: (t.flatten() / (y != -100).sum()).view(len(y), T).sum(1),
    "inverse": lambda t, y: t.sum(1) * (1.0 / (y != -100).sum()),
    "expanded": lambda t, y: t.sum(1) / (y != -100).sum().float().expand(len(y)),
    "class weights": lambda t, y: (t.sum(1) * WEIGHTS[y[:, 0]]) / WEIGHTS[y[:, 0]].sum(),
    "normalised weights": lambda t, y: t.sum(1) * (WEIGHTS[y[:, 0]] / WEIGHTS[y[:, 0]].sum()),
    "without gradients": lambda t, y: t.sum(1) / without_gradients(y),
    "an integer": lambda t, y: t.sum(1) / int((y != -100).sum()),
    "an item": lambda t, y: t.sum(1) / (y != -100).sum().item(),
    "losses": lambda t, y: t.sum(1) / t.sum().detach(),
    "a float": lambda t, y: t.sum(1) / float((y != -100).sum()),
    "an inverse float": lambda t, y: t.sum(1) * (1 / int((y != -100).sum())),
    "a shifted float": lambda t, y: t.sum(1) / float((y[:, 1:] != -100).sum()),
}
AT_ONCE = list(SHARED)[:8]  # computed from the labels by torch operations
OWN: dict[str, Tokens] = {
    "own tokens": lambda t, y: t.sum(1) / means(y),
    "own mask": lambda t, y: (t * (y != -100)).sum(1) / (y != -100).sum(1).clamp(min=1),
    "a constant": lambda t, y: t.sum(1) / T,
    "a constant tensor": lambda t, y: t.sum(1) * torch.tensor(0.5),
    "own class weights": lambda t, y: t.sum(1) * WEIGHTS[y[:, 0]],
}


# Weights of the losses of torch: outputs, labels and example weights to losses
Weighted = Callable[[Tensor, Tensor, Tensor], Tensor]
BCE = partial(F.binary_cross_entropy_with_logits, reduction="none")


def class_counts(labels_B: Tensor) -> Tensor:
    return torch.bincount(labels_B, minlength=VOCABULARY).float()


def one_hot(labels_B: Tensor) -> Tensor:
    return F.one_hot(labels_B, VOCABULARY).float()


OF_THE_BATCH: dict[str, Weighted] = {
    "inverse frequencies": lambda o, y, w: F.cross_entropy(o, y, 1 / (1 + class_counts(y)), reduction="none"),
    "smoothed": lambda o, y, w: F.cross_entropy(o, y, class_counts(y), reduction="none", label_smoothing=0.1),
    "positions": lambda o, y, w: F.cross_entropy(
        o.unsqueeze(2), y.unsqueeze(1), weight=class_counts(y), reduction="none"
    ).mean(1),
    "margin": lambda o, y, w: F.multi_margin_loss(o, y, weight=class_counts(y), reduction="none"),
    "logistic": lambda o, y, w: BCE(o, one_hot(y), pos_weight=class_counts(y)).mean(1),
    "probabilities": lambda o, y, w: F.binary_cross_entropy(
        o.sigmoid(), one_hot(y), weight=w.mean(0), reduction="none"
    ).mean(1),
    "one number": lambda o, y, w: BCE(o, one_hot(y), weight=w.mean(0, keepdim=True)).mean(1),
}
OF_ITS_EXAMPLE: dict[str, Weighted] = {
    "constants": lambda o, y, w: F.cross_entropy(o, y, weight=WEIGHTS, reduction="none"),
    "constant logistic": lambda o, y, w: BCE(o, one_hot(y), pos_weight=WEIGHTS).mean(1),
    "logistic": lambda o, y, w: BCE(o, one_hot(y), weight=w).mean(1),
    "positional": lambda o, y, w: F.binary_cross_entropy(o.sigmoid(), one_hot(y), w, reduction="none").mean(1),
    "labels": lambda o, y, w: BCE(o, one_hot(y), weight=WEIGHTS[y].unsqueeze(1)).mean(1),
    "no weight": lambda o, y, w: BCE(o, one_hot(y)).mean(1),
}


def weighted_losses(probe: IndependenceProbe, size: int, how: Weighted) -> Tensor:
    random = torch.Generator().manual_seed(size)
    labels_B, weights_B1 = torch.randint(0, VOCABULARY, (size,), generator=random), torch.rand(size, 1)
    labels_B, weights_B1 = probe.mark((labels_B, weights_B1))
    return how(TABLE(torch.arange(size) % VOCABULARY), labels_B, weights_B1)


@pytest.mark.parametrize("how", OF_THE_BATCH)
def test_weights_of_a_loss_from_the_whole_batch_are_refused(how: str) -> None:
    probe = IndependenceProbe()
    with pytest.raises(CoupledExamplesError, match="class weights"):
        probe.examine(weighted_losses(probe, 7, OF_THE_BATCH[how]))


@pytest.mark.parametrize("how", OF_ITS_EXAMPLE)
def test_constant_weights_and_weights_of_single_examples_are_accepted(how: str) -> None:
    probe = IndependenceProbe()
    for size in (7, 9, 2, 8):
        probe.examine(weighted_losses(probe, size, OF_ITS_EXAMPLE[how]))


@torch.no_grad()
def without_gradients(labels_BT: Tensor) -> Tensor:
    return (labels_BT != -100).sum()


@pytest.mark.parametrize("how", SHARED)
def test_a_number_of_the_whole_batch_is_refused(how: str) -> None:
    probe = IndependenceProbe()
    with pytest.raises(CoupledExamplesError, match=r"its own count.*public constant"):
        for size in (7,) if how in AT_ONCE else (7, 9, 8):
            ids_BT, labels_BT = probe.mark(draw(size))
            labels_BT[:, 0] = labels_BT[:, 0].clamp(min=0)
            probe.examine(SHARED[how](token_losses(ids_BT, labels_BT), labels_BT))


@pytest.mark.parametrize("how", OWN)
def test_numbers_of_single_examples_are_accepted(how: str) -> None:
    probe = IndependenceProbe()
    for size in (7, 9, 2, 8, 11):
        ids_BT, labels_BT = probe.mark(draw(size))
        labels_BT[:, 0] = labels_BT[:, 0].clamp(min=0)
        probe.examine(OWN[how](token_losses(ids_BT, labels_BT), labels_BT))


def test_a_schedule_is_accepted_as_a_python_float() -> None:
    probe = IndependenceProbe()
    for step in range(12):
        ids_BT, labels_BT = probe.mark(draw(5 + step % 3))
        probe.examine(token_losses(ids_BT, labels_BT).sum(1) * min(1.0, step / 10))


def test_a_run_refuses_the_mean_over_all_valid_tokens_before_its_first_release() -> None:
    model = nn.Embedding(VOCABULARY, VOCABULARY)
    _, private = private_run(model, dataset=torch.utils.data.TensorDataset(*draw(40)), sampling="full")
    for ids_BT, labels_BT in private.loader:
        losses_BT = F.cross_entropy(model(ids_BT).transpose(1, 2), labels_BT, reduction="none")
        with pytest.raises(CoupledExamplesError, match="valid tokens"):
            private.step(losses_BT.sum(1) / (labels_BT != -100).sum())
        break
    assert private.steps == 0
