"""Layouts where data can reorder rows: known ones are read from the indices, and never used where they do not hold."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import CoupledExamplesError
from clipwise.gradients import Memory, ProbedWarning, by_loop, per_example_gradients, probed_steps
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.moves import carries, moves_of, owner_map
from tests.gradients.cases import losses as losses_of
from tests.gradients.cases import oracle, trainable

D, T, EXPERTS = 4, 6, 3
Forward = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """A layer, a function of its output that may move rows, and another layer."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self, self.first(x).tanh())
        return self.second(h) + 0.1 * sum(layer(x[:, 0]).sum(1) for layer in (self.gate, *self.experts)).view(
            -1, *[1] * (h.dim() - 1)
        )


def in_place(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    h = h * 1
    write(h)
    return h


def score(h: Tensor) -> Tensor:
    return (h.detach() * torch.arange(1, D + 1)).sum(-1)


def experts(m: nn.Module, h: Tensor) -> Tensor:
    rows = h.reshape(-1, D)
    shares, chosen = m.gate(rows).softmax(-1).topk(2)
    total = torch.zeros_like(rows)
    for number, expert in enumerate(m.experts):
        place, which = torch.where(chosen == number)
        total.index_add_(0, place, expert(rows[place]) * shares[place, which, None])
    return total.view_as(h)


def sorted_experts(m: nn.Module, h: Tensor) -> Tensor:
    """As `transformers` does: rows sorted by expert, one grouped product, and back."""
    rows = h.reshape(-1, D)
    shares, chosen = m.gate(rows).softmax(-1).topk(2)
    which, order = chosen.flatten().sort()
    weights = torch.stack([each.weight for each in m.experts])
    offsets = torch.bincount(which, minlength=EXPERTS).cumsum(0)
    parts = rows[order // 2].tensor_split(offsets[:-1])
    made = torch.cat([part @ w.T for part, w in zip(parts, weights, strict=True)])
    back = (made * shares.flatten()[order, None])[order.argsort()]
    return back.view(len(rows), 2, D).sum(1).view_as(h)


def merged(m: nn.Module, h: Tensor) -> Tensor:
    """Features of each example take the places of the largest positions."""
    mask = score(h) > score(h).median(1, keepdim=True).values
    features = m.gate(h[:, : T // 2]) @ m.experts[0].weight[:EXPERTS]
    return h.masked_scatter(mask[..., None].expand_as(h), features)


def summed_by_owner(m: nn.Module, h: Tensor) -> Tensor:
    mask = score(h) > 0
    owner = mask.nonzero()[:, 0]
    return torch.zeros(len(h), D, dtype=h.dtype).index_add(0, owner, m.gate(h[mask]) @ m.experts[0].weight[:EXPERTS])


def back_in_order(m: nn.Module, h: Tensor) -> Tensor:
    order = score(h[:, 0]).argsort()
    return m.experts[0](h[order]).tanh()[order.argsort()]


def scattered(m: nn.Module, h: Tensor) -> Tensor:
    place = score(h).argsort(1)[..., None].expand_as(h)
    return torch.zeros_like(h).scatter(1, place, h) + torch.zeros_like(h).scatter_add(1, place, h.tanh())


BETWEEN: dict[str, Forward] = {
    "gather along positions": lambda m, h: h.gather(1, score(h).argsort(1)[..., None].expand_as(h)),
    "sort": lambda m, h: h.sort(1).values,
    "top-k": lambda m, h: h.topk(2, 1).values,
    "h[:, index]": lambda m, h: h[:, torch.tensor([3, 0, 5, 1, 4, 2])],
    "h[arange(B), index]": lambda m, h: h[torch.arange(len(h)), score(h).argmax(1)],
    "index_select along positions": lambda m, h: h.index_select(1, torch.tensor([3, 0, 5, 1, 4, 2])),
    "take_along_dim": lambda m, h: torch.take_along_dim(h, score(h).argsort(1)[..., None], 1),
    "masked_select": lambda m, h: h.masked_select(torch.ones(h.shape[1:], dtype=torch.bool)).view_as(h),
    "scatter and scatter_add": scattered,
    "masked_scatter": merged,
    "h[:, 0] = ...": lambda m, h: in_place(h, lambda t: t[:, 0].copy_(h[:, 1:].mean(1))),
    "h[..., :k] += ...": lambda m, h: in_place(h, lambda t: t[..., :2].add_(h[..., 2:])),
    "h[mask] = ...": lambda m, h: in_place(h, lambda t: t.__setitem__(score(h) > 0, h[score(h) > 0] * 0.5)),
    "in-place ReLU on a view": lambda m, h: F.relu((h * 1).unflatten(-1, (2, 2)), inplace=True).flatten(-2),
    "in-place ReLU behind instance norm": lambda m, h: F.relu(F.instance_norm(h), inplace=True),
    "selected rows summed": summed_by_owner,
    "sorted examples": back_in_order,
    "experts": experts,
    "experts, sorted rows": sorted_experts,
}
CHANGES_ITS_GRAPH = {"experts, sorted rows"}  # the sizes of the parts


def draw(batch: int, seed: int) -> Tensor:
    return torch.randn(batch, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def require_exact(model: nn.Module, x: Tensor, memory: Memory) -> None:
    found = per_example_gradients(losses_of(model, (x,)), trainable(model), memory).squared_norms()
    for name, g in oracle(model, (x,)).items():
        torch.testing.assert_close(found[name], g.flatten(1).square().sum(1))


@pytest.mark.parametrize("name", BETWEEN)
def test_layouts_are_exact_and_not_probed_again(name: str) -> None:
    torch.manual_seed(0)
    model, memory = Layers(BETWEEN[name]).double(), Memory()
    probed = []
    for seed, batch in enumerate((5, 5, 7, 5, 7, 8, 11)):
        before = sum(map(bool, memory.resolver.probing.recent))
        require_exact(model, draw(batch, seed), memory)
        probed.append(sum(map(bool, memory.resolver.probing.recent)) - before)
    assert name in CHANGES_ITS_GRAPH or sum(probed) <= 3, probed


def exact_in_its_graph(
    loss: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor, memory: Memory
) -> None:
    """Compare with one backward pass per example through the same graph."""
    found = per_example_gradients(loss(model, x), trainable(model), memory).squared_norms()
    truth = by_loop(loss(model, x), trainable(model)).squared_norms()
    for name, square_B in truth.items():
        torch.testing.assert_close(found[name], square_B)


ORDERS: list[Callable[[int], Tensor]] = [torch.arange, torch.arange, torch.arange, torch.randperm, torch.randperm]


def one_by_one(h: Tensor, order: Tensor) -> Tensor:
    """Rows are written to places that no node shows."""
    out = torch.zeros_like(h)
    for i, place in enumerate(order.tolist()):
        out[place] = h[i] * 2
    return out


@pytest.mark.parametrize(
    "move",
    [
        lambda h, order: h[order],
        lambda h, order: h.index_select(0, order),
        lambda h, order: h.gather(0, order[:, None].expand_as(h)),
        lambda h, order: torch.zeros_like(h).index_add(0, order, h),
        lambda h, order: torch.zeros_like(h).index_copy(0, order, h),
        lambda h, order: torch.zeros_like(h).index_put((order,), h),
        lambda h, order: torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), h),
        lambda h, order: torch.zeros_like(h).scatter_reduce(0, order[:, None].expand_as(h), h, "sum"),
        lambda h, order: h.take(order[:, None] * D + torch.arange(D)),
        one_by_one,
    ],
)
def test_an_order_that_changes_after_the_layout_is_trusted(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)).double(), Memory()
    for make in ORDERS:
        order = make(6)

        def loss(m: nn.Module, x: Tensor, order: Tensor = order) -> Tensor:
            return m[1](move(m[0](x).tanh(), order)).square().sum(1)

        exact_in_its_graph(loss, model, torch.randn(6, D, dtype=torch.float64), memory)


@pytest.mark.parametrize("write", ["index_add", "in place"])
def test_rows_that_begin_to_mix_examples_are_refused(write: str) -> None:
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)).double(), Memory()

    def loss(shift: int) -> Tensor:
        h = model[0](torch.randn(6, D, dtype=torch.float64, requires_grad=True)).tanh()
        places = torch.arange(6) // (shift + 1)
        if write == "index_add":
            made = h.index_add(0, places, h)
        else:
            made = h * 1
            made[int(places[1])] += h[1]
        return model[1](made).square().sum(1)

    for _ in range(3):
        per_example_gradients(loss(0), trainable(model), memory)
    with pytest.raises(CoupledExamplesError):
        per_example_gradients(loss(1), trainable(model), memory)
    per_example_gradients(loss(0), trainable(model), memory)


def test_lengths_that_become_uneven_are_not_taken_for_even() -> None:
    """Rows of examples, reduced by their owner: the first batches have equally many for each."""
    torch.manual_seed(0)
    model, memory = nn.Linear(D, D).double(), Memory()
    for counts in ([2] * 6, [2] * 6, [2] * 6, [1, 3, 2, 2, 1, 3], [4, 1, 1, 1, 1, 4]):
        owner = torch.arange(6).repeat_interleave(torch.tensor(counts))

        def loss(m: nn.Module, x: Tensor, owner: Tensor = owner) -> Tensor:
            zeros = torch.zeros(6, D, dtype=x.dtype)
            return zeros.scatter_reduce(0, owner[:, None].expand_as(x), m(x).tanh(), "sum").square().sum(1)

        exact_in_its_graph(loss, model, torch.randn(12, D, dtype=torch.float64), memory)


def test_a_gradient_that_begins_to_arrive_is_checked() -> None:
    """No batch showed the layout around the index, since its result had the weight 0."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), Memory()
    for weight, order in (
        (0.0, torch.arange(6)),
        (0.0, torch.arange(6)),
        (0.0, torch.arange(6)),
        (1.0, torch.randperm(6)),
    ):

        def loss(m: nn.Module, x: Tensor, weight: float = weight, order: Tensor = order) -> Tensor:
            h = m[0](x).tanh()
            return (m[1](h).tanh() + weight * m[1](h.detach()[order]).tanh()[torch.argsort(order)]).square().sum(1)

        exact_in_its_graph(loss, model, torch.randn(6, D, dtype=torch.float64), memory)


# ------------------------------------------------------------------ what the indices show

OPERATIONS: dict[str, Callable[[Tensor], tuple[Tensor, int]]] = {
    "gather": lambda x: (x.gather(0, torch.randint(0, len(x), x.shape)), 0),
    "sort": lambda x: (x.sort(0).values, 0),
    "topk": lambda x: (x.topk(3, 0).values, 0),
    "index_select": lambda x: (x.index_select(0, torch.randint(0, len(x), (9,))), 0),
    "index": lambda x: (x[torch.randint(0, len(x), (9,)), torch.randint(0, 2, (9,))], 0),
    "index by mask": lambda x: (x[torch.rand(len(x)) > 0.4], 0),
    "index behind an axis": lambda x: (x[:, torch.tensor([1, 0])], 0),
    "masked_select": lambda x: (x.masked_select(torch.rand(len(x), 1) > 0.4), 0),
    "index_put": lambda x: (torch.zeros(15, 2).index_put((torch.randperm(15)[: len(x)],), x), 1),
    "index_add": lambda x: (torch.zeros(15, 2).index_add(0, torch.randint(0, 15, (len(x),)), x), 1),
    "index_copy": lambda x: (torch.zeros(15, 2).index_copy(0, torch.randperm(15)[: len(x)], x), 1),
    "scatter": lambda x: (torch.zeros(15, 2).scatter(0, torch.randperm(15)[:12, None].expand(12, 2), x), 1),
    "scatter_add": lambda x: (torch.zeros(15, 2).scatter_add(0, torch.randint(0, 15, (12, 2)), x), 1),
    "masked_scatter": lambda x: (torch.zeros(15, 2).masked_scatter((torch.rand(15, 1) > 0.5).expand(15, 2), x), 1),
    "masked_scatter of entries": lambda x: (torch.zeros(15, 2).masked_scatter(torch.rand(15, 2) > 0.5, x), 1),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", OPERATIONS)
def test_owners_that_the_indices_show_are_those_of_the_gradients(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    batch = 3
    x = torch.randn(12, 2, requires_grad=True)
    out, operand = OPERATIONS[name](x * 1)
    (move,) = [each for each in moves_of(out.grad_fn) or () if each.operand == operand]
    owner_N = torch.randint(-1, batch, (len(out),))
    if not bool((owner_N >= 0).any()):
        owner_N[0] = 0
    outer = Ragged.of(0, owner_N, batch)
    reached = []
    for i in range(batch):
        weight = torch.rand(out.shape) + 1
        (g,) = torch.autograd.grad((out * weight)[owner_N == i].sum(), x, retain_graph=True, allow_unused=True)
        reached.append(torch.zeros(12, dtype=torch.bool) if g is None else (g != 0).any(1))
    reached_BN = torch.stack(reached)
    found_N, fits = move.owners(owner_map(outer, out.dim(), out.device), 0)
    assert bool(fits) == bool((reached_BN.sum(0) <= 1).all())
    if bool(fits):
        expected_N = torch.where(reached_BN.any(0), reached_BN.long().argmax(0), -1)
        assert torch.equal(found_N, expected_N)
        inner = Ragged.of(0, found_N, batch)
        maps = owner_map(inner, 2, x.device), owner_map(outer, out.dim(), x.device)
        assert bool(move.agrees(*maps))
        assert bool(carries(out.grad_fn, {0: outer}, {operand: inner}))
        row = int((found_N >= 0).nonzero()[0])
        wrong_N = found_N.clone()
        wrong_N[row] = (found_N[row] + 1) % batch
        wrong = Ragged.of(0, wrong_N, batch)
        assert not bool(move.agrees(owner_map(wrong, 2, x.device), maps[1]))
        assert not bool(carries(out.grad_fn, {0: outer}, {operand: wrong}))


def test_an_index_along_another_axis_moves_no_example() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    out = (x * 1).gather(1, torch.randint(0, 5, (4, 5)))
    (move,) = moves_of(out.grad_fn) or ()
    assert move.moves_nothing(Layout(0, 1, 4, 1), Layout(0, 1, 4, 1))
    assert not move.moves_nothing(Layout(1, 1, 5, 1), Layout(1, 1, 5, 1))


# ------------------------------------------------------------------ the warning


@pytest.mark.parametrize(
    ("name", "text"),
    [("unclear", r"AddmmBackward0 behind layer 'first'.*index_add"), ("changing", "pad the sequences to one length")],
)
def test_a_run_whose_steps_are_probed_is_warned_once(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probed_steps, "_STEPS", 6)
    torch.manual_seed(0)
    model, memory = nn.ModuleDict({"first": nn.Linear(D, 1)}).double(), Memory()
    memory.resolver.probing = probed_steps.Probing()
    texts: list[str] = []
    for step in range(14):
        x = draw(5, step)
        if name == "unclear":  # a product with a matrix of the data takes rows to examples
            mask = score(x) > 0
            owner = F.one_hot(mask.nonzero()[:, 0], 5).to(x)
            losses = (owner.T @ model["first"](x[mask]).tanh()).squeeze(1)
        else:
            h = model["first"](x).squeeze(-1)
            for _ in range(step):
                h = h.tanh()
            losses = h.sum(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            per_example_gradients(losses, trainable(model), memory)
        texts += [str(w.message) for w in caught if w.category is ProbedWarning]
    assert len(texts) == 1
    assert re.search(text, texts[0])
