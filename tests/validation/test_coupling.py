"""The probe finds coupled examples on the first batches and at the first gradient of each path."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import CoupledExamplesError
from clipwise.validation.coupling import IndependenceProbe, _behind

B, T, D = 7, 4, 5

Loss = Callable[..., Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))


MODEL = _model()
TABLE = nn.Embedding(9, D)
ENCODER = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
CNN = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
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
    "batch norm": (lambda x, y: cross_entropy(F.batch_norm(MODEL(x), None, None, training=True), y), vectors),
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
    "words and positions": (lambda x: (TABLE(x) + TABLE(torch.arange(T))).tanh().flatten(1).sum(1), words),
    "time first": (lambda x: TABLE(x.T).tanh().sum((0, 2)), words),
    "unused input": (lambda x, y: TABLE(y).sum(1), vectors),
    "numbers for targets": (lambda x, y: (MODEL(x).sum(1) - y).square(), lambda: (torch.randn(B, D), torch.randn(B))),
    "inputs without entries": (lambda x, y: MODEL(x).sum(1) + y.sum(1), lambda: (torch.randn(B, D), torch.randn(B, 0))),
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


class Passes:
    """Counts the backward passes that a probe makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        grad = torch.autograd.grad

        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return grad(*args, **options)

        monkeypatch.setattr(torch.autograd, "grad", counted)

    def taken(self) -> int:
        """Passes since the last call."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


def test_the_probe_runs_on_the_first_batches_only(passes: Passes) -> None:
    looking = IndependenceProbe()
    for batch in range(4):
        x, y = looking.mark(vectors())
        looking.examine(cross_entropy(MODEL(x), y))
        assert (passes.taken() > 0) == (batch < 2)
        assert looking.is_settled == (batch > 0)


def test_a_batch_of_one_is_not_counted(passes: Passes) -> None:
    looking = IndependenceProbe()
    for size in (1, 1, 1, 1, B, B, B):
        (x,) = looking.mark((torch.randn(size, D),))
        looking.examine(MODEL(x).sum(1))
        assert not looking.is_settled or size > 1
    assert passes.taken() == 2 * 3


def test_the_probe_continues_after_a_refusal() -> None:
    looking = IndependenceProbe()
    for _ in range(4):
        x, y = looking.mark(vectors())
        with pytest.raises(CoupledExamplesError):
            looking.examine(cross_entropy(MODEL(centred(x)), y))


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


def test_a_nan_example_is_no_coupling_and_ends_no_probe() -> None:
    looking = IndependenceProbe()
    for _ in range(3):
        x = torch.randn(B, B, D)
        x[2] = torch.nan
        (marked,) = looking.mark((x,))
        looking.examine(MODEL(marked).square().sum((1, 2)))
    (clean,) = looking.mark((torch.randn(B, B, D),))  # still examined
    with pytest.raises(CoupledExamplesError):
        looking.examine(centred(MODEL(clean)).square().sum((1, 2)))


def test_one_loss_per_position_is_refused() -> None:
    """With as many positions as examples, it has the shape of one loss per example."""
    with pytest.raises(CoupledExamplesError):
        probe(lambda x: MODEL(x).square().sum((0, 2)), lambda: (torch.randn(B, B, D),))


# Gradients of exactly 0


def head_of_zeros() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    return model


def test_a_head_of_zeros_hides_nothing() -> None:
    """All input gradients are 0 until the head has moved."""
    model, looking = head_of_zeros(), IndependenceProbe()
    for _ in range(5):
        x, y = looking.mark(vectors())
        looking.examine(cross_entropy(model(centred(x)), y))
    with torch.no_grad():
        model[2].weight.normal_()
    x, y = looking.mark(vectors())
    with pytest.raises(CoupledExamplesError):
        looking.examine(cross_entropy(model(centred(x)), y))


GATED: dict[str, Callable[[float, Tensor, Tensor], Tensor]] = {
    "a weight": lambda w, x, y: cross_entropy(MODEL(x), y) + w * centred(MODEL(x)).square().sum(1),
    "a tensor": lambda w, x, y: cross_entropy(MODEL(x), y) + torch.tensor(w) * centred(MODEL(x)).square().sum(1),
    "alpha": lambda w, x, y: torch.add(cross_entropy(MODEL(x), y), centred(MODEL(x)).square().sum(1), alpha=w),
    "a gate inside": lambda w, x, y: cross_entropy(MODEL(x + w * (x.mean(0) - x)), y),
    "a hinge": lambda w, x, y: cross_entropy(MODEL(x), y) + (centred(MODEL(x)).square().sum(1) - (1 - w) * 1e6).relu(),
    "a branch": lambda w, x, y: cross_entropy(MODEL(x), y) + (centred(MODEL(x)).square().sum(1) if w else 0.0),
}


@pytest.mark.parametrize("way", GATED)
@pytest.mark.parametrize("asleep", [3, 100])
def test_a_path_is_examined_when_its_first_gradient_arrives(way: str, asleep: int) -> None:
    """The error is raised before that batch is released. (Old paths are examined only now and then.)"""
    looking = IndependenceProbe()
    for _ in range(asleep):
        x, y = looking.mark(vectors())
        looking.examine(GATED[way](0.0, x, y))
    is_in_the_loss = way in ("a weight", "a branch")
    with pytest.raises(CoupledExamplesError):
        for _ in range(1 if asleep == 3 or is_in_the_loss else 16):
            x, y = looking.mark(vectors())
            looking.examine(GATED[way](1.0, x, y))


def test_paths_without_gradients_cost_few_passes(passes: Passes) -> None:
    looking = IndependenceProbe()
    taken = []
    for _ in range(160):
        x, y = looking.mark(vectors())
        looking.examine(cross_entropy(MODEL(x), y) + MODEL((2 * x).floor()).square().sum(1))
        taken.append(passes.taken())
    assert taken[:2] == [3, 3]
    assert max(taken[2:66]) == 1
    assert sum(taken[70:]) <= 6
    assert not looking.is_settled


def test_longer_networks_of_known_operations_are_not_probed_again(passes: Passes) -> None:
    """Each has its own graph of known operations."""
    looking = IndependenceProbe()
    cell = nn.GRUCell(D, 4)
    taken = []
    for length in (3, 4, 5, 9, 2, 7):
        (x,) = looking.mark((torch.randn(B, length, D),))
        h = torch.zeros(B, 4)
        for t in range(length):
            h = cell(x[:, t], h)
        looking.examine(h.square().sum(1))
        taken.append(passes.taken())
    assert sum(taken) <= 3 * 2 and taken[-2:] == [0, 0]


# Pairs of examples

OUTPUT = nn.Linear(D, 1)
PAIRED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "subtracted": lambda out, y: (out - y).square().flatten(1).sum(1),
    "averaged": lambda out, y: (out - y.float()).abs().mean(1),
    "the other way": lambda out, y: (y[:, None] - out.squeeze(1)).square().sum(1),
    "as a row": lambda out, y: (
        F.binary_cross_entropy_with_logits(
            out.expand(-1, len(y)), y.float()[None].expand(len(y), -1), reduction="none"
        ).sum(1)
        + (out - y[None]).sum(1)
    ),
    "by a loss function": lambda out, y: F.mse_loss(out, y.float(), reduction="none").sum(1),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("how", PAIRED)
def test_losses_of_pairs_are_refused(how: str, integers: bool) -> None:
    looking = IndependenceProbe()
    y = torch.randint(0, 2, (B,))
    x, y = looking.mark((torch.randn(B, D), y if integers else y.float()))
    with pytest.raises(CoupledExamplesError, match=r"pair of examples.*squeeze\(1\).*unsqueeze\(1\)"):
        looking.examine(PAIRED[how](OUTPUT(x), y))


def test_matching_shapes_are_no_pairs() -> None:
    """Also if the sequence length or the layer width equals the batch size."""
    looking = IndependenceProbe()
    scale, levels = nn.Parameter(torch.randn(B)), torch.rand(B)
    for _ in range(3):
        x, y, row = looking.mark((torch.randn(B, D), torch.randint(0, 3, (B,)), torch.randn(B, B)))
        out = OUTPUT(x)
        looking.examine((out.squeeze(1) - y).square())
        looking.examine((out - y[:, None]).square().sum(1))
        looking.examine((out - row).square().sum(1))
        looking.examine((out - levels).abs().sum(1))
        looking.examine((y[:, None] * scale).square().sum(1))


def test_frozen_layers_are_recorded_only_until_they_are_examined(passes: Passes) -> None:
    """Recording keeps their activations, which training without privacy does not."""
    looking = IndependenceProbe()
    frozen, head = nn.Sequential(nn.Linear(D, 8), nn.Tanh()).requires_grad_(False), nn.Linear(8, 3)
    recorded = []
    for _ in range(8):
        x, y = looking.mark(vectors())
        losses = cross_entropy(head(frozen(x)), y)
        looking.examine(losses)
        recorded.append("TanhBackward0" in _behind(losses)[1])
    assert recorded[:2] == [True, True] and recorded[-2:] == [False, False]

    def centred_later() -> None:
        x, y = looking.mark(vectors())
        looking.examine(centred(cross_entropy(head(frozen(x)), y)))

    centred_later()  # new operations: the probe runs on the next batch
    with pytest.raises(CoupledExamplesError):
        centred_later()


def test_coupling_in_frozen_layers_is_found() -> None:
    frozen, head = nn.Linear(D, 8).requires_grad_(False), nn.Linear(8, 3)
    with pytest.raises(CoupledExamplesError):
        probe(lambda x, y: cross_entropy(head(centred(frozen(x))), y), vectors)


def test_whether_the_graph_leads_to_the_batch_does_not_depend_on_values() -> None:
    """The statement shows it. Clamped ids are other ids in the second batch only."""
    looking = IndependenceProbe()
    for ids in (torch.full((B, T), 3), torch.full((B, T), 30)):
        (marked,) = looking.mark((ids,))
        looking.examine(TABLE(marked.clamp(max=8)).flatten(1).sum(1))
        assert looking.reaches_batch
    looking.mark((ids,))
    assert looking.examine(TABLE(ids.clamp(max=8)).flatten(1).sum(1)) and not looking.reaches_batch
