"""What is refused: parameters and optimizers that do not fit, losses of a wrong shape, coupled examples."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.checks import BufferGuard, IndependenceProbe, require_losses, require_real, trainable_parameters
from clipwise.errors import ConfigurationError, CoupledExamplesError, StepError, UnsupportedModelError

B, T, D = 7, 4, 5


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# Parameters


def test_trainable_parameters_are_those_of_model_and_optimizer() -> None:
    model = nn.Linear(D, 2)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight", "bias"]
    model.bias.requires_grad_(False)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight"]


def test_what_does_not_fit_is_refused_by_name() -> None:
    model = nn.Linear(D, 2)
    everything = sgd(*model.parameters())
    for bad, words in (
        ((lambda x: x, everything), "torch.nn.Module"),
        ((model, list(model.parameters())), "torch.optim.Optimizer"),
        ((model, sgd(model.weight)), "'bias' is trainable but the optimizer"),
        ((model, sgd(*model.parameters(), nn.Parameter(torch.zeros(7)))), r"\(7,\)"),
        ((nn.Linear(D, 2).requires_grad_(False), everything), "no trainable parameter"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainable_parameters(*bad)  # type: ignore[arg-type]


def test_complex_parameters_are_refused_where_a_strategy_does_not_take_them() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    found = trainable_parameters(model, sgd(*model.parameters()))
    with pytest.raises(ConfigurationError, match=r"'w' is torch\.complex64, and clipping=Lipschitz"):
        require_real(found, "Lipschitz")


# Losses

GOOD = torch.ones(B, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0] * B, "must be a tensor"),
        (GOOD.mean(), "single number"),
        (GOOD[:, None].expand(B, T), "2 dimensions"),
        (GOOD[1:], "one entry for each example"),
        (torch.cat([GOOD, GOOD]), "one entry for each example"),
        (torch.ones(B, dtype=torch.long), "real floating point"),
        (torch.ones(B, dtype=torch.complex64), "real floating point"),
        (GOOD.detach(), "no gradient"),
    ],
)
def test_losses_that_cannot_be_told_apart_are_refused(losses: object, words: str) -> None:
    with pytest.raises(StepError, match=words) as error:
        require_losses(losses, B)
    assert str(B) not in str(error.value), "the size drawn is secret"


def test_one_loss_an_example_is_accepted() -> None:
    assert require_losses(GOOD, B) is GOOD
    assert len(require_losses(GOOD[:0], 0)) == 0


# Independence

Loss = Callable[..., Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))


MODEL = _model()
TABLE = nn.Embedding(9, D)
ENCODER = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
CNN = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1),
    nn.GroupNorm(2, 4),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16, 3),
)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def vectors() -> tuple[Tensor, ...]:
    return torch.randn(B, D), torch.randint(0, 3, (B,))


def words() -> tuple[Tensor, ...]:
    return (torch.randint(0, 9, (B, T)),)


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


COUPLED: dict[str, tuple[Loss, Callable[[], tuple[Tensor, ...]]]] = {
    "inputs minus their mean": (lambda x, y: cross_entropy(MODEL(centred(x)), y), vectors),
    "outputs minus their mean": (lambda x, y: cross_entropy(centred(MODEL(x)), y), vectors),
    "batch norm": (
        lambda x, y: cross_entropy(F.batch_norm(MODEL(x), None, None, training=True), y),
        vectors,
    ),
    "contrastive": (lambda x, y: cross_entropy(MODEL(x) @ MODEL(x).T, torch.arange(B)), vectors),
    "losses minus their mean": (lambda x, y: centred(cross_entropy(MODEL(x), y)), vectors),
    "losses over their sum": (lambda x, y: cross_entropy(MODEL(x), y).softmax(0), vectors),
    "sorted losses": (lambda x, y: cross_entropy(MODEL(x), y).sort()[0], vectors),
    "mean of all losses, repeated": (lambda x, y: cross_entropy(MODEL(x), y).mean().expand(B), vectors),
    "shuffled targets of others": (lambda x, y: (MODEL(x) - MODEL(x.roll(1, 0))).square().sum(1), vectors),
    "words minus their mean": (lambda x: centred(TABLE(x)).tanh().flatten(1).sum(1), words),
    "words compared": (lambda x: (TABLE(x).mean(1) @ TABLE(x).mean(1).T).logsumexp(1), words),
    "shifted words": (lambda x: centred(TABLE(x[:, 1:])).tanh().flatten(1).sum(1), words),
}
INDEPENDENT: dict[str, tuple[Loss, Callable[[], tuple[Tensor, ...]]]] = {
    "perceptron": (lambda x, y: cross_entropy(MODEL(x), y), vectors),
    "dropout": (lambda x, y: cross_entropy(F.dropout(MODEL(x)), y), vectors),
    "convolutions": (lambda x: CNN(x).square().sum(1), lambda: (torch.randn(B, 2, 4, 4),)),
    "encoder": (lambda x: ENCODER(x).flatten(1).sum(1), lambda: (torch.randn(B, T, 6),)),
    "encoder, length as batch": (lambda x: ENCODER(x).tanh().sum((1, 2)), lambda: (torch.randn(B, B, 6),)),
    "words": (lambda x: TABLE(x).tanh().flatten(1).sum(1), words),
    "words and positions": (
        lambda x: (TABLE(x) + TABLE(torch.arange(T))).tanh().flatten(1).sum(1),
        words,
    ),
    "time first": (lambda x: TABLE(x.T).tanh().sum((0, 2)), words),
    "unused input": (lambda x, y: TABLE(y).sum(1), vectors),
    "in place": (lambda x, y: cross_entropy(MODEL(x.mul_(2)), y), vectors),
}


def probe(loss: Loss, draw: Callable[[], tuple[Tensor, ...]]) -> None:
    torch.manual_seed(1)
    looking = IndependenceProbe()
    looking.examine(loss(*looking.mark(draw())))


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_are_found(name: str) -> None:
    with pytest.raises(CoupledExamplesError):
        probe(*COUPLED[name])


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_examples_pass(name: str) -> None:
    probe(*INDEPENDENT[name])


def test_a_probe_looks_at_the_first_batches_only() -> None:
    looking = IndependenceProbe()
    for batch in range(4):
        x, y = looking.mark(vectors())
        assert x.requires_grad == (batch < 2)
        looking.examine(cross_entropy(MODEL(x), y))


def test_a_batch_of_one_decides_nothing() -> None:
    looking = IndependenceProbe()
    for _ in range(4):
        (x,) = looking.mark((torch.randn(1, D),))
        assert x.requires_grad
        looking.examine(MODEL(x).sum(1))


def test_after_a_refusal_the_probe_still_looks() -> None:
    looking = IndependenceProbe()
    for _ in range(4):
        x, y = looking.mark(vectors())
        with pytest.raises(CoupledExamplesError):
            looking.examine(cross_entropy(MODEL(centred(x)), y))


def test_the_users_own_batch_is_not_touched() -> None:
    x = torch.randn(B, D)
    (marked,) = IndependenceProbe().mark((x,))
    marked += 1
    assert not x.requires_grad
    assert not torch.equal(x, marked)


Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    ("batch", "find"),
    [
        ({"x": torch.randn(B, D), "name": "a"}, lambda b: b["x"]),
        (OrderedDict(x=torch.randn(B, D)), lambda b: b["x"]),
        ([torch.randn(B, D), None], lambda b: b[0]),
        (Pair(torch.randn(B, D), torch.zeros(B)), lambda b: b.image),
        ({"deep": ({"x": torch.randn(B, D)},)}, lambda b: b["deep"][0]["x"]),
    ],
)
def test_batches_keep_their_structure(batch: Any, find: Callable[[Any], Tensor]) -> None:
    looking = IndependenceProbe()
    marked = looking.mark(batch)
    assert type(marked) is type(batch)
    with pytest.raises(CoupledExamplesError):
        looking.examine(centred(MODEL(find(marked))).square().sum(1))


def test_a_nan_example_is_no_coupling_and_no_proof_of_none() -> None:
    looking = IndependenceProbe()
    for _ in range(3):
        x = torch.randn(B, B, D)
        x[2] = torch.nan
        (marked,) = looking.mark((x,))
        looking.examine(MODEL(marked).square().sum((1, 2)))
    (clean,) = looking.mark((torch.randn(B, B, D),))  # still looked at
    with pytest.raises(CoupledExamplesError):
        looking.examine(centred(MODEL(clean)).square().sum((1, 2)))


def test_one_loss_a_position_is_none_an_example() -> None:
    """Of a length that equals the batch, it would pass for one loss an example."""
    with pytest.raises(CoupledExamplesError):
        probe(lambda x: MODEL(x).square().sum((0, 2)), lambda: (torch.randn(B, B, D),))


# Buffers


def test_a_buffer_is_remembered_from_batch_to_batch() -> None:
    """After the first batches only versions are looked at; a change is still found."""
    model = nn.Linear(D, 2)
    model.register_buffer("count", torch.zeros(()))
    guard = BufferGuard(model)
    for _ in range(5):
        guard.remember()
        guard.compare()
    model.count += 1  # between batches: not learned in a forward pass
    guard.remember()
    guard.compare()
    model.count += 1
    with pytest.raises(UnsupportedModelError, match="count"):
        guard.compare()


def test_a_nan_in_a_buffer_is_no_change() -> None:
    model = nn.Linear(D, 2)
    model.register_buffer("scale", torch.tensor([torch.nan, 1.0]))
    guard = BufferGuard(model)
    guard.remember()
    guard.compare()


def test_spectral_norm_may_iterate() -> None:
    """Its buffers look at weights alone."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 2))
    guard = BufferGuard(model)
    guard.remember()
    model(torch.randn(3, D))
    guard.compare()
