"""Layouts: splitting and scaling rows by example, and distinguishing layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.errors import CoupledExamplesError
from clipwise.gradients import Memory, by_loop, per_example_gradients
from clipwise.gradients import layout as layout_module
from clipwise.gradients.layout import Layout, Probe, hypotheses, probe_weights
from clipwise.gradients.resolve import Growth
from tests.gradients.cases import trainable

QUICK = settings(max_examples=50, deadline=None, derandomize=True)
sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout and the shape of a tensor that it fits."""
    outer, batch, inner = draw(sizes), draw(st.integers(1, 5)), draw(sizes)
    before, after = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    return Layout(len(before), outer, batch, inner), (*before, outer * batch * inner, *after)


def owner(layout: Layout, index: int) -> int:
    """The definition: an axis of size outer * B * inner holds example (index // inner) % B."""
    return index // layout.inner % layout.batch


def scale(layout: Layout, t: Tensor, per_example_B: Tensor) -> Tensor:
    """Multiply the rows of example i by the i-th number."""
    shape = [1] * t.dim()
    shape[layout.axis] = -1
    return t * layout.along_axis(per_example_B).view(shape)


@QUICK
@given(layouts())
def test_split_gathers_exactly_an_examples_rows(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    t = torch.arange(torch.Size(shape).numel()).view(shape)
    split = layout.split(t)
    assert split.shape == (
        layout.batch, *shape[: layout.axis], layout.outer, layout.inner, *shape[layout.axis + 1 :],
    )  # fmt: skip
    for i in range(layout.batch):
        mine = [k for k in range(shape[layout.axis]) if owner(layout, k) == i]
        assert torch.equal(
            split[i].flatten(layout.axis, layout.axis + 1), t.index_select(layout.axis, torch.tensor(mine))
        )


@QUICK
@given(layouts())
def test_along_axis_and_scale_follow_the_definition(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    numbers = torch.arange(1.0, layout.batch + 1)
    along = layout.along_axis(numbers)
    assert along.tolist() == [float(owner(layout, k) + 1) for k in range(shape[layout.axis])]
    t = torch.randn(shape)
    scaled = layout.split(scale(layout, t, numbers))
    torch.testing.assert_close(scaled, layout.split(t) * numbers.view(-1, *[1] * (scaled.dim() - 1)))


@QUICK
@given(layouts())
def test_rows_has_every_position_in_one_dimension(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    t = torch.randn(*shape, 3)
    rows = layout.rows(t)
    assert rows.shape == (layout.batch, t.numel() // 3 // layout.batch, 3)
    assert torch.equal(rows.flatten().sort()[0], t.flatten().sort()[0])


@QUICK
@given(layouts())
def test_every_layout_is_among_the_hypotheses_and_agrees_with_itself(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    assert layout in list(hypotheses(torch.Size(shape), layout.batch))
    weights = probe_weights(layout.batch, torch.zeros(1))
    plain = torch.randn(shape)
    probe = Probe(plain, scale(layout, plain, weights), weights)
    assert probe.agrees(layout)
    # Every other layout that agrees gives each live row the same weight.
    for other in probe.layouts():
        assert torch.equal(scale(other, plain, weights), scale(layout, plain, weights))


def resized(before: Layout, shape: torch.Size, batch: int) -> Layout | None:
    found = layout_module.resized([[before]], [shape], batch)
    return None if found is None else found[0][0]


@QUICK
@given(layouts(), st.integers(1, 5))
def test_resized_is_the_same_layout_or_nothing(drawn: tuple[Layout, tuple[int, ...]], batch: int) -> None:
    layout, shape = drawn
    for k in range(1, 9):
        found = resized(layout, torch.Size((*shape[: layout.axis], k * batch, *shape[layout.axis + 1 :])), batch)
        if found is None:
            continue
        assert found.batch == batch and found.size == k * batch
        # A side of the fold of size 1 stays 1, or nothing is known.
        assert found.outer == 1 if layout.outer == 1 else layout.inner > 1 or found.inner == 1
        assert found.inner == 1 if layout.inner == 1 else layout.outer > 1 or found.outer == 1


def test_a_layout_of_single_rows_does_not_determine_folds() -> None:
    assert resized(Layout(0, 1, 4, 1), torch.Size([8, 3]), 4) is None


def test_an_axis_that_keeps_its_size_in_another_batch_is_doubted() -> None:
    assert resized(Layout(0, 1, 4, 3), torch.Size([12, 5]), 6) is None
    assert resized(Layout(0, 1, 4, 3), torch.Size([18, 5]), 6) == Layout(0, 1, 6, 3)
    assert resized(Layout(0, 1, 4, 3), torch.Size([12, 5]), 4) == Layout(0, 1, 4, 3)


# Probes


@pytest.mark.parametrize("batch", [2, 3, 13, 14, 40])
def test_probe_weights_are_powers_of_two_as_distinct_as_can_be(batch: int) -> None:
    weights = probe_weights(batch, torch.zeros(1))
    assert (weights.log2() == weights.log2().round()).all()
    assert len(weights.unique()) == min(batch, 13)
    assert weights.max() / weights.min() <= 2**12


def test_probe_weights_cannot_be_foreseen() -> None:
    torch.manual_seed(0)
    one = [probe_weights(5, torch.zeros(1)) for _ in range(4)]
    torch.manual_seed(0)
    other = [probe_weights(5, torch.zeros(1)) for _ in range(4)]
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_gradient_that_cancels_in_the_plain_sum_is_not_dead() -> None:
    weights = torch.tensor([1.0, 2.0])
    assert not Probe(torch.zeros(3, 2), torch.ones(3, 2), weights).is_dead()
    assert Probe(torch.zeros(3, 2), torch.zeros(3, 2), weights).is_dead()


def test_entries_that_are_not_finite_are_ignored() -> None:
    """[T, B] with T = B: a NaN example crosses every row of the wrong axis."""
    weights = torch.tensor([1.0, 4.0, 2.0])
    plain = torch.randn(3, 3)
    weighted = plain * weights
    for bad in (plain, weighted):
        bad[:, 1] = torch.nan
    probe = Probe(plain, weighted, weights)
    assert probe.layouts() == [Layout(1, 1, 3, 1)]


def test_rounding_of_denormals_is_not_a_disagreement() -> None:
    weights = torch.tensor([1.0, 4096.0])
    plain = torch.tensor([[1.0], [3e-45]])
    weighted = torch.tensor([[1.0], [5e-42]])  # 4096 * 3e-45 is 1.2e-41: digits were lost
    assert Probe(plain, weighted, weights).agrees(Layout(0, 1, 2, 1))
    assert not Probe(plain, torch.tensor([[1.0], [5e-6]]), weights).agrees(Layout(0, 1, 2, 1))


@pytest.mark.parametrize("small", [1e-150, 1e-158, 1e-161, 1e-170])
def test_squares_that_underflow_are_not_a_disagreement(small: float) -> None:
    """Losses that are nearly 0, in float64. Rows with a square that does not underflow still count."""
    weights_B = torch.tensor([1.0, 4096.0, 2.0], dtype=torch.float64)
    plain = torch.tensor([[1.0, 0.5], [1.1 * small, 0.0], [0.3, 0.2]], dtype=torch.float64)
    assert Probe(plain, plain * weights_B[:, None], weights_B).agrees(Layout(0, 1, 3, 1))
    wrong = torch.tensor([[1.0, 0.5], [1.1e-130, 0.0], [0.3, 0.2]], dtype=torch.float64)
    assert not Probe(wrong, wrong * weights_B.flip(0)[:, None], weights_B).agrees(Layout(0, 1, 3, 1))


# Growth: a tensor computed from parameters alone keeps its size


SHAPES_THAT_MAY_GROW: list[tuple[list[tuple[tuple[int, ...], int]], bool]] = [
    ([((4, 7), 4), ((5, 7), 5), ((3, 7), 3)], True),
    ([((8, 7), 4), ((10, 7), 5), ((6, 7), 3)], True),
    ([((4, 7), 4), ((5, 9), 5), ((3, 2), 3)], True),  # with changing sequence lengths
    ([((4, 7), 4), ((4, 7), 4), ((4, 7), 4)], False),  # the batch size never changes
    ([((4, 7), 4), ((4, 7), 2), ((4, 7), 1)], False),
    ([((4, 7), 4), ((5, 7), 5), ((5, 7), 5)], False),  # once may be chance
    ([((5, 7), 4), ((6, 7), 5), ((4, 7), 3)], False),
    ([((4, 4), 4), ((4, 5), 5), ((4, 3), 3)], True),
]


def observed(
    growth: Growth, shapes: list[tuple[tuple[int, ...], int]], select: Callable[[int], Tensor | None]
) -> list[bool]:
    return [growth.observe(torch.Size(shape), batch, select(batch)) for shape, batch in shapes]


@pytest.mark.parametrize(("shapes", "grows"), SHAPES_THAT_MAY_GROW)
def test_growth_of_rows_that_data_select(shapes: list[tuple[tuple[int, ...], int]], grows: bool) -> None:
    torch.manual_seed(0)
    assert observed(Growth(), shapes, lambda B: torch.randint(1000, (B, 7)))[-1] == grows


@pytest.mark.parametrize(("shapes", "grows"), SHAPES_THAT_MAY_GROW)
def test_growth_of_other_tensors_needs_more_batches(shapes: list[tuple[tuple[int, ...], int]], grows: bool) -> None:
    growth = Growth()
    found = [grown for _ in range(10) for grown in observed(growth, shapes, lambda B: None)]
    more = len({batch for _, batch in shapes}) > 1 and grows
    assert found[-1] == more
    assert not any(found[:10])


def test_growth_is_certain_after_ten_different_batches() -> None:
    growth = Growth()
    found = observed(growth, [((3 * B, 2), B) for B in range(60, 70)], lambda B: None)
    assert found == [False] * 9 + [True]


def test_positions_do_not_grow_whatever_their_number() -> None:
    shapes = [((5 * B, 7), B) for B in (1, 2, 3) * 50]
    assert not any(observed(Growth(), shapes, lambda B: torch.arange(5 * B)))


@pytest.mark.parametrize("lengths", [range(3, 12), (64, 128, 192), (5, 10)], ids=str)
def test_padded_lengths_that_follow_the_batch_by_chance_do_not_grow(lengths: Sequence[int]) -> None:
    """The longest of 1 to 3 records; 2,000 runs, of which the criterion of two changes refuses some."""
    random = torch.Generator().manual_seed(0)
    followed_twice = 0
    for _ in range(2000):
        growth = Growth()
        for _ in range(60):
            B = int(torch.randint(1, 4, (), generator=random))
            T = max(lengths[i] for i in torch.randint(len(lengths), (B,), generator=random).tolist())
            assert not growth.observe(torch.Size((1, T, 4)), B)
            if not growth.axes:
                break
            followed_twice += growth.grown == 2
    assert followed_twice


# Whole graphs: coincidences of sizes


class Reordered(nn.Module):
    """A linear layer (with a norm) on rows in some order; the losses are batch first."""

    def __init__(self, there: Callable[[Tensor], Tensor], back: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.there, self.back = there, back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.linear(self.there(x)).tanh()), x.shape[0])


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "batch first": (lambda x: x, lambda h, B: h),
    "time first": (lambda x: x.transpose(0, 1), lambda h, B: h.transpose(0, 1)),
    "folded major": (lambda x: x.reshape(-1, 4), lambda h, B: h.view(B, -1, 4)),
    "folded minor": (lambda x: x.transpose(0, 1).reshape(-1, 4), lambda h, B: h.view(-1, B, 4).transpose(0, 1)),
    "folded both": (
        lambda x: x.view(x.shape[0], 2, -1, 4).transpose(0, 1).reshape(-1, 4),
        lambda h, B: h.view(2, B, -1, 4).transpose(0, 1).flatten(1, 2),
    ),
}
SIZES = [(4, 4), (2, 2), (4, 8), (8, 4), (6, 2), (3, 6), (4, 4), (2, 8)]  # (B, T): T = B, T a multiple, ...


@pytest.mark.parametrize("marked", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_right_layout_is_found_among_sizes_that_coincide(order: str, marked: bool) -> None:
    """One memory for all sizes, as in a run."""
    torch.manual_seed(0)
    model, memory = Reordered(*ORDERS[order]).double(), Memory()
    for B, T in SIZES:
        x = torch.randn(B, T, 4, dtype=torch.float64, requires_grad=marked)
        found = per_example_gradients(model(x).flatten(1).square().sum(1).tanh(), trainable(model), memory)
        for i in range(B):
            alone = by_loop(model(x[i : i + 1]).flatten(1).square().sum(1).tanh(), trainable(model))
            for name, g in found.instantiate(slice(i, i + 1)).items():
                torch.testing.assert_close(g, alone.instantiate(slice(0, 1))[name], msg=f"{name} at {B}, {T}")


COUPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "subtracts the batch mean": lambda h: h - h.mean(0),
    "divides by the batch norm": lambda h: h / h.norm(),
    "softmax over the batch": lambda h: h.softmax(0),
    "similarities": lambda h: (h @ h.t()).softmax(1),
    "the neighbour's row": lambda h: h * h.roll(1, 0),
    "cumulative": lambda h: h.cumsum(0),
}


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_rows_that_mix_examples_have_no_layout(coupling: str) -> None:
    """With inputs that require gradients, as the loader's first batches do."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(CoupledExamplesError):
        per_example_gradients(COUPLINGS[coupling](model(x)).square().sum(1), trainable(model), Memory())


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_rows_that_mix_examples_are_found_without_input_gradients_too(coupling: str) -> None:
    """The mixed rows might be computed from parameters alone, but they grow with the batch."""
    torch.manual_seed(0)
    model, memory = nn.Linear(4, 4), Memory()
    with pytest.raises(CoupledExamplesError):
        for B in range(5, 15):
            h = COUPLINGS[coupling](model(torch.randn(B, 4)))
            per_example_gradients((h * torch.randn(h.shape)).sum(1), trainable(model), memory)


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("lookup", ["embedding", "index"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_tokens_that_mix_examples_are_found_after_three_batches(coupling: str, lookup: str) -> None:
    """Integers cannot require gradients. What data select is no position, so few batches are enough."""
    torch.manual_seed(0)
    model, memory = nn.Embedding(50, 4), Memory()
    with pytest.raises(CoupledExamplesError):
        for B in (5, 6, 7):
            tokens = torch.randint(50, (B,))
            h = COUPLINGS[coupling](model(tokens) if lookup == "embedding" else model.weight[tokens])
            per_example_gradients((h * torch.randn(h.shape)).sum(1), trainable(model), memory)


class WithPositions(nn.Module):
    """Tokens with positions, of which no row belongs to an example."""

    def __init__(self, lookup: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(50, 4), nn.Embedding(20, 4), nn.Linear(4, 1)
        self.lookup = lookup

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.tokens(x) + self.lookup(self.positions, torch.arange(x.shape[1]))).tanh()).mean((1, 2))


@pytest.mark.parametrize(
    "lookup",
    [lambda table, at: table(at), lambda table, at: table(at[None]), lambda table, at: table.weight[at]],
    ids=["embedding", "with an axis of size 1", "index"],
)
def test_positions_may_follow_the_batch_by_chance(lookup: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
    """Dynamic padding, with lengths that are 5 times the batch size."""
    torch.manual_seed(0)
    model, memory = WithPositions(lookup), Memory()
    for B in (1, 2, 3, 1, 3, 2, 1):
        found = per_example_gradients(model(torch.randint(50, (B, 5 * B))), trainable(model), memory)
        assert found.squared_norms()


def test_losses_that_sum_to_a_constant_are_found() -> None:
    """Their plain gradient is 0 everywhere, which must not count as no gradient."""
    model, x = nn.Linear(4, 1), torch.randn(5, 4, requires_grad=True)
    losses = model(x).squeeze(1)
    with pytest.raises(CoupledExamplesError):
        per_example_gradients(losses - losses.mean(), trainable(model), Memory())
