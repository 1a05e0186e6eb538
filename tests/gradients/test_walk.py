"""The results of a graph walk: uses, tensors computed from parameters alone, and open nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.gradients import Memory, by_loop, per_example_gradients
from clipwise.gradients.outline import Outline
from clipwise.gradients.resolve import Resolver
from clipwise.gradients.walk import Graph, node_name, walk
from tests.gradients.cases import trainable


def named_uses(losses: Tensor, model: nn.Module) -> dict[str, set[str]]:
    """Operation -> parameters behind its operands, after the probes have decided."""
    graph = walk(losses, trainable(model))
    Resolver().resolve(graph)
    return {node_name(u.node): set(u.describe(graph.names)[:-1].split(": ")[1].split(", ")) for u in graph.uses}


class Weights(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def test_a_use_takes_data_and_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    found = named_uses(model(torch.randn(5, 4)).sum(1), model)
    assert found == {"AddmmBackward0": {"0.weight", "0.bias"}, "MmBackward0": {"2.weight"}}


def test_a_parameter_in_the_loss_is_a_use() -> None:
    model = Weights(w=(4, 3), temperature=())
    losses = (torch.randn(5, 4) @ model.w).sum(1) / model.temperature
    assert named_uses(losses, model) == {"MmBackward0": {"w"}, "DivBackward0": {"temperature"}}


# w * x is a use if x has examples, and a tensor computed from parameters alone if x is a constant. Both have the same
# graph; the probe distinguishes them.
OPEN: dict[str, tuple[Callable[[Weights, Tensor], Tensor], str]] = {
    "masked weight": (lambda m, x: x @ (m.w * torch.ones(4, 3)), "MmBackward0"),
    "scaled weight": (lambda m, x: x @ (m.w * 0.5), "MmBackward0"),
    "shifted weight": (lambda m, x: x @ (m.w + torch.ones(3)), "MmBackward0"),
    "product of constants": (lambda m, x: x @ (torch.randn(4, 4) @ m.w), "MmBackward0"),
    "scaled data": (lambda m, x: (m.w[:, 0] * x).tanh(), "MulBackward0"),
    "shifted data": (lambda m, x: (m.w[:, 0] + x).tanh(), "AddBackward0"),
    "repeated parameter": (lambda m, x: (m.w[0].expand(5, 3) * x[:, :3]).tanh(), "ExpandBackward0"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_open_nodes_are_decided(kind: str) -> None:
    torch.manual_seed(0)
    model = Weights(w=(4, 3))
    apply, use = OPEN[kind]
    assert named_uses(apply(model, torch.randn(5, 4)).sum(1), model) == {use: {"w"}}


@pytest.mark.parametrize("kind", OPEN)
def test_open_nodes_are_decided_when_the_weight_is_as_long_as_the_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = Weights(w=(4, 3))
    apply, use = OPEN[kind]
    if kind != "repeated parameter":
        assert named_uses(apply(model, torch.randn(4, 4)).sum(1), model) == {use: {"w"}}


def require_exact(apply: Callable[[Weights, Tensor], Tensor], model: Weights, x: Tensor, memory: Memory) -> None:
    found = per_example_gradients(apply(model, x).tanh().sum(1), trainable(model), memory).instantiate(slice(0, len(x)))
    for i in range(len(x)):
        alone = by_loop(apply(model, x[i : i + 1]).tanh().sum(1), trainable(model)).instantiate(slice(0, 1))
        for name, g in alone.items():
            torch.testing.assert_close(found[name][i], g[0], rtol=1e-9, atol=1e-9)


MIXED: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "linear": lambda m, x: x @ m.w,
    "masked": lambda m, x: x @ (m.w * torch.ones(4, 3).double()),
    "constant product": lambda m, x: x @ (torch.linspace(-1, 1, 16).double().view(4, 4) @ m.w),
    "weight norm": lambda m, x: x @ (m.w / m.w.norm(dim=0)),
    "low rank": lambda m, x: x @ (m.w + m.up @ m.down),
    "scaled": lambda m, x: (x * m.w[:, 0]) @ m.w,
}
SPARSE = {
    "one-hot": lambda: torch.eye(4).double(),
    "blocks": lambda: torch.eye(4).double()[[0, 3]],
    "one live": lambda: torch.eye(4).double()[[1]] * torch.tensor([[1.0], [0.0], [0.0], [0.0]]).double(),
    "zero": lambda: torch.zeros(4, 4).double(),
}


@pytest.mark.filterwarnings("error::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.parametrize("kind", MIXED)
def test_sparse_batches_do_not_mislead_about_dense_ones(kind: str, sparse: str) -> None:
    """Each one-hot example touches one row of a weight, as if the weight itself had examples."""
    torch.manual_seed(0)
    model = Weights(w=(4, 3), up=(4, 2), down=(2, 3)) if kind == "low rank" else Weights(w=(4, 3))
    memory = Memory()
    for x in [*[SPARSE[sparse]() for _ in range(4)], *[torch.randn(B, 4).double() for B in (4, 2, 4, 3)]]:
        require_exact(MIXED[kind], model.double(), x, memory)


class Times(torch.autograd.Function):
    """An operation without a rule."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return None, g * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
def test_sparse_batches_decide_nothing_about_other_sizes() -> None:
    """Without a rule, the origin of an axis is unknown: it kept its size in another batch, so it is in doubt."""
    torch.manual_seed(0)
    model, memory = Weights(w=(4, 3)).double(), Memory()

    def apply(m: Weights, x: Tensor) -> Tensor:
        return torch.bmm(x[None], Times.apply(torch.full((4, 3), 2.0).double(), m.w)[None])[0]

    for x in [*[torch.eye(4).double() for _ in range(4)], torch.randn(2, 4).double()]:
        require_exact(apply, model, x, memory)


def test_examples_whose_gradients_cancel_exactly_are_detected() -> None:
    """The plain sum of gradients is 0 at the weight, which does not mean that no gradient arrives."""
    model = Weights(w=(4, 3)).double()
    x = torch.tensor([[1.0, 2, 3, 4], [1, 0, 0, 0], [-2, -2, -3, -4]]).double()
    losses = F.linear(x, (model.w * torch.ones(4, 3)).t()).sum(1)
    found = per_example_gradients(losses, trainable(model), Memory())
    assert (found.squared_norms()["w"] > 0.1).all()


# The stored data of a graph, and changes by the data


def piecewise(lengths: list[int]) -> Callable[[Weights, Tensor], Tensor]:
    return lambda m, x: torch.stack([piece.sum() for piece in (x @ m.w).tanh().split(lengths)])


def in_order(order: list[int]) -> Callable[[Weights, Tensor], Tensor]:
    return lambda m, x: torch.stack([(x @ m.w).tanh()[i].sum() for i in order])


def rolled(by: int) -> Callable[[Weights, Tensor], Tensor]:
    return lambda m, x: (x @ m.w).tanh().roll(by, 0).sum(1)


def written_in_place(order: list[int]) -> Callable[[Weights, Tensor], Tensor]:
    def losses(m: Weights, x: Tensor) -> Tensor:
        h = (x @ m.w).tanh().sum(1)
        out = torch.zeros(len(order), dtype=x.dtype)
        for place, i in enumerate(order):
            out[place] = h[i]
        return out

    return losses


def looked_up(order: list[int]) -> Callable[[Weights, Tensor], Tensor]:
    return lambda m, x: F.embedding(torch.tensor(order), (x @ m.w).tanh()).sum(1)


def indexed(order: list[int]) -> Callable[[Weights, Tensor], Tensor]:
    return lambda m, x: (x @ m.w).tanh()[order].sum(1)


MOVES = {
    "pieces of other lengths": (piecewise([2, 2, 2]), piecewise([1, 2, 3]), 6),
    "rows taken one by one": (in_order([0, 1, 2]), in_order([2, 0, 1]), 3),
    "rolled": (rolled(0), rolled(1), 3),
    "written in place": (written_in_place([0, 1, 2]), written_in_place([1, 2, 0]), 3),
    "looked up": (looked_up([0, 1, 2]), looked_up([1, 2, 0]), 3),
    "indexed": (indexed([0, 1, 2]), indexed([1, 2, 0]), 3),
}


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("move", MOVES)
def test_rows_that_the_data_move_are_followed(move: str) -> None:
    torch.manual_seed(0)
    before, after, rows = MOVES[move]
    model, memory = Weights(w=(4, 3)).double(), Memory()
    for apply in (before, before, before, before, after, before, after):
        x = torch.randn(rows, 4).double()
        found = per_example_gradients(apply(model, x), trainable(model), memory).instantiate(slice(0, 3))
        torch.testing.assert_close(found, by_loop(apply(model, x), trainable(model)).instantiate(slice(0, 3)))


def test_constants_that_do_not_cut_along_the_examples_change_no_outline() -> None:
    """Another sequence length gives the same graph: probing it each time would be slow."""
    model = Weights(w=(4, 3))

    def outline(T: int) -> Outline:
        h = torch.randn(5, T, 4) @ model.w
        return walk(h[:, : T - 1].sum((1, 2)) + h[:, T - 1].sum(1), trainable(model)).outline

    assert outline(7) == outline(9)


def test_rows_of_a_parameter_may_be_picked_and_cut() -> None:
    """A position table cut to the sequence length, and an indexed table: no row of an example moves."""
    model = Weights(places=(10, 4), table=(7, 4))

    def graph(T: int) -> Graph:
        h = model.table[torch.randint(0, 7, (5, T))] + model.places[:T]
        return walk(h.tanh().sum((1, 2)), trainable(model))

    assert graph(3).outline == graph(4).outline
    assert not graph(3).outline.moves_rows
    moved = model.table[torch.randint(0, 7, (5, 3))][[1, 0, 2, 3, 4]] + model.places[:3]
    assert walk(moved.sum((1, 2)), trainable(model)).outline.moves_rows


def test_a_deep_graph_is_described_without_delay() -> None:
    """Paths through residual connections double at every layer; nodes do not."""
    model = Weights(w=(4,))
    h = model.w
    for _ in range(200):
        h = h + h.tanh()
    losses = (torch.randn(5, 4) * h).sum(1)
    assert named_uses(losses, model) == {"MulBackward0": {"w"}}
