"""The cached data of one outline must apply to graphs of that outline only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from clipwise.gradients import Memory, by_loop, per_example_gradients
from clipwise.gradients import walk as walking
from clipwise.gradients.forms import Tied
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.walk import Graph, Outlines, walk
from tests.gradients.cases import trainable

B, D = 5, 4
Forward = Callable[[nn.Module, Tensor], Tensor]


class Two(nn.Module):
    """Two weights of one shape, and one that is tied to either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))
        self.c = nn.Parameter(torch.randn(D))


def require_exact(model: nn.Module, losses: Callable[[], Tensor], memory: Memory) -> None:
    found = per_example_gradients(losses(), trainable(model), memory).instantiate(slice(0, B))
    expected = by_loop(losses(), trainable(model)).instantiate(slice(0, B))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were walked in full."""
    made: list[Graph] = []
    real = walk

    def counted(*args: object) -> Graph:
        made.append(real(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(walking, "walk", counted)
    return made


# Pairs of graphs with the same operations in the same order, but with different wiring or splits.
SIMILAR: dict[str, tuple[Forward, Forward]] = {
    "the other weight first": (lambda m, x: (x @ m.a).tanh() @ m.b + m.c, lambda m, x: (x @ m.b).tanh() @ m.a + m.c),
    "one weight twice": (
        lambda m, x: (x @ m.a).tanh() @ m.b + (x @ m.a + m.c).tanh(),
        lambda m, x: (x @ m.a).tanh() @ m.b + (x @ m.b + m.c).tanh(),
    ),
    "one result twice": (
        lambda m, x: (lambda h: h * h.exp())((x @ m.a).tanh() @ m.b + m.c),
        lambda m, x: ((x @ m.a).tanh() @ m.b + m.c) * ((x @ m.a).tanh() @ m.b + m.c).exp(),
    ),
    "another output": (
        lambda m, x: ((x @ m.a).tanh() @ m.b + m.c).split(2, 1)[0],
        lambda m, x: ((x @ m.a).tanh() @ m.b + m.c).split(2, 1)[1],
    ),
    "another operation": (lambda m, x: (x @ m.a).tanh() @ m.b + m.c, lambda m, x: (x @ m.a).sigmoid() @ m.b + m.c),
    "a weight turned or not": (  # square, so that only the values differ
        lambda m, x: (x @ m.a.permute(1, 0)).tanh() @ m.b.transpose(0, 0) + m.c,
        lambda m, x: (x @ m.a.permute(0, 1)).tanh() @ m.b.transpose(-2, 1) + m.c,
    ),
    "operands the other way round": (
        lambda m, x: (x @ m.a).tanh() - (x @ m.b + m.c).tanh(),
        lambda m, x: (x @ m.b + m.c).tanh() - (x @ m.a).tanh(),
    ),
}


@pytest.mark.parametrize("kind", SIMILAR)
def test_similar_graphs_are_distinguished(kind: str) -> None:
    torch.manual_seed(0)
    model, memory = Two(), Memory()
    first, second = SIMILAR[kind]
    for pair in ((first, second), (second, first)):
        remembered = Outlines()
        graphs = [f(model, torch.randn(B, D)).sum(1) for f in pair]
        found = [remembered.walk(losses, trainable(model)).outline for losses in graphs]
        assert found == [walk(losses, trainable(model)).outline for losses in graphs]
        assert found[0] != found[1]
    for _ in range(4):  # alternating, until both are trusted
        for forward in (first, second):
            x = torch.randn(B, D)
            require_exact(model, lambda f=forward, x=x: f(model, x).sum(1), memory)  # type: ignore[misc]


def test_a_result_that_is_used_twice_is_not_two_results() -> None:
    """In both orders: the cached graph may have more nodes, or fewer."""
    torch.manual_seed(0)
    model = Two()
    x = torch.randn(B, D)

    def once() -> Tensor:
        h = (x @ model.a + model.c).tanh()
        return (h * h @ model.b).sum(1)

    def twice() -> Tensor:
        return ((x @ model.a + model.c).tanh() * (x @ model.a + model.c).tanh() @ model.b).sum(1)

    for pair in ((once, twice), (twice, once)):
        outlines = Outlines()
        nodes = [len(outlines.walk(make(), trainable(model)).order) for make in pair]
        assert nodes == [len(walk(make(), trainable(model)).order) for make in pair]
        assert nodes[0] != nodes[1]


def test_losses_are_one_output_of_the_last_operation() -> None:
    model, outlines = Two(), Outlines()
    first, second = ((torch.randn(B, D) @ model.a + model.c) @ model.b).unbind(1)[:2]
    found = [outlines.walk(losses, trainable(model)).outline for losses in (first, second)]
    assert [outline.output for outline in found] == [0, 1]


def test_a_known_graph_is_not_walked_again(walks: list[Graph]) -> None:
    torch.manual_seed(0)
    model, outlines = nn.Sequential(nn.Linear(D, 3), nn.ReLU(), nn.Linear(3, 2)), Outlines()
    graphs = [outlines.walk(model(torch.randn(b, D)).sum(1), trainable(model)) for b in (5, 5, 7)]
    assert len(walks) == 1
    assert graphs[0].outline is graphs[1].outline is graphs[2].outline
    again = walk(model(torch.randn(3, D)).sum(1), trainable(model))
    assert again.outline == graphs[0].outline and hash(again.outline) == hash(graphs[0].outline)


def test_the_nodes_are_those_of_the_current_graph() -> None:
    model, outlines = nn.Sequential(nn.Linear(D, 3), nn.ReLU(), nn.Linear(3, 2)), Outlines()
    for _ in range(3):
        losses = model(torch.randn(B, D)).sum(1)
        assert outlines.walk(losses, trainable(model)).order == walk(losses, trainable(model)).order


def test_another_model_with_the_same_operations_has_its_own_parameters() -> None:
    torch.manual_seed(0)
    memory = Memory()
    for _ in range(3):
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        x = torch.randn(B, D)
        require_exact(model, lambda m=model, x=x: m(x).sum(1), memory)  # type: ignore[misc]
        found = per_example_gradients(model(x).sum(1), trainable(model), memory)
        for name, c in found.by_parameter.items():
            assert c.path.parameters[name] is trainable(model)[name]


def test_sizes_may_change_and_come_back() -> None:
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 2)), Memory()
    for b, T in [(5, 3), (5, 3), (5, 3), (7, 3), (5, 5), (5, 3), (6, 1), (5, 5)]:
        x = torch.randn(b, T, D)
        found = per_example_gradients(model(x).sum((1, 2)), trainable(model), memory).instantiate(slice(0, b))
        expected = by_loop(model(x).sum((1, 2)), trainable(model)).instantiate(slice(0, b))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_is_frozen_later_is_detected() -> None:
    """The graph then has fewer leaves, or a leaf that is not a trainable parameter."""
    torch.manual_seed(0)
    model, outlines = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), Outlines()
    x = torch.randn(B, D)
    whole = outlines.walk(model(x).sum(1), trainable(model))
    fewer = {name: p for name, p in trainable(model).items() if name != "0.weight"}
    asked = outlines.walk(model(x).sum(1), fewer)
    assert set(asked.outline.parameters.values()) == set(fewer)
    model[0].weight.requires_grad_(False)
    frozen = outlines.walk(model(x).sum(1), trainable(model))
    assert len({whole.outline, asked.outline, frozen.outline}) == 3


def test_an_unreached_parameter_is_refused_every_time() -> None:
    model, outlines = Two(), Outlines()
    x = torch.randn(B, D)
    reached = {name: p for name, p in trainable(model).items() if name != "b"}
    for _ in range(2):
        outlines.walk((x @ model.a + model.c).sum(1), reached)
        with pytest.raises(UnsupportedModelError, match="'b'"):
            outlines.walk((x @ model.a + model.c).sum(1), trainable(model))


def test_data_dependent_splits_are_compared_every_time() -> None:
    model, outlines = Two(), Outlines()
    x = torch.randn(2 * B, D)

    def outline(begin: int) -> object:
        h = (x @ model.a).tanh() @ model.b + model.c
        return outlines.walk(h[begin : begin + B].sum(1), trainable(model)).outline

    assert outline(0) is outline(0)
    assert outline(0) != outline(B)


def test_a_transposed_vector_is_itself() -> None:
    torch.manual_seed(0)
    model, memory = Two(), Memory()
    for _ in range(3):
        x = torch.randn(B, D)
        require_exact(model, lambda x=x: ((x @ model.a) @ model.b.t() * model.c.t()).tanh().sum(1), memory)  # type: ignore[misc]


def test_rows_that_the_data_chose_are_gathered_though_each_example_has_one() -> None:
    t = torch.arange(6.0).view(3, 2)
    owners = torch.tensor([2, 0, 1])
    assert torch.equal(Ragged.of(0, owners, 3).rows(t), t[[1, 2, 0]].view(3, 1, 2))
    assert torch.equal(Layout(0, 1, 3, 1).rows(t), t.view(3, 1, 2))


@pytest.mark.parametrize("turn", [lambda w: w.T, lambda w: w.mT, lambda w: w.permute(1, 0), lambda w: w.t()])
def test_a_tied_weight_is_not_written_out_however_it_is_transposed(turn: Callable[[Tensor], Tensor]) -> None:
    table = nn.Embedding(9, 4)
    losses = (table(torch.randint(0, 9, (3, 5))).tanh() @ turn(table.weight)).exp().sum((1, 2))
    found = per_example_gradients(losses, trainable(table), Memory())
    assert isinstance(found.by_parameter["weight"].form, Tied)


def test_a_tied_weight_is_not_written_out_under_autocast() -> None:
    """The head has a cast of the table to bfloat16, the lookup has none."""
    torch.manual_seed(0)
    table = nn.Embedding(9, 4)
    ids = torch.randint(0, 9, (3, 5))

    def losses() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(table(ids).tanh(), table.weight).float().exp().sum((1, 2))

    found = per_example_gradients(losses(), trainable(table), Memory())
    assert isinstance(found.by_parameter["weight"].form, Tied)
    expected = by_loop(losses(), trainable(table)).instantiate(slice(0, 3))["weight"]
    torch.testing.assert_close(found.instantiate(slice(0, 3))["weight"], expected, rtol=2e-2, atol=2e-2)
    weights = {"weight": torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)}
    summed = expected[0] + 0.5 * expected[2]
    torch.testing.assert_close(found.weighted_sums(weights)["weight"], summed, rtol=2e-2, atol=2e-2)
    assert (found.squared_norms()["weight"] >= expected.double().flatten(1).square().sum(1) * (1 - 2**-6)).all()
