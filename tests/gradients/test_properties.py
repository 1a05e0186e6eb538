"""Random models and shapes: per-example gradients equal those of a forward pass per example."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.gradients import FallbackWarning, Memory, by_loop, examples, forms, per_example_gradients
from clipwise.gradients.walk import walk
from tests.gradients.cases import CASES, Case, D, losses, oracle, trainable, vectors
from tests.sites import site

THOROUGH = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
FEWER = settings(THOROUGH, max_examples=25)
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


class Stack(nn.Module):
    """Layers, some of them called twice, around a state of shape [B, *state]."""

    def __init__(self, layers: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(layers), order

    def forward(self, x: Tensor) -> Tensor:
        for k in self.order:
            x = self.layers[k](x)
        return x


class TimeFirst(nn.Module):
    """A layer with the positions before the examples."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Frames(nn.Module):
    """The first positions folded into the rows of an image layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def words(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: (torch.randint(0, 5, (batch, *shape)),)


@st.composite
def models(draw: st.DrawFn) -> tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]:
    """A model that preserves the shape of its state, and inputs for it."""
    width = draw(st.sampled_from([2, 4, 6]))
    kind = draw(st.sampled_from(["vectors", "images", "ids"]))
    middle = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    head: list[Callable[[], nn.Module]] = []
    if kind == "images":
        spatial = draw(st.lists(st.integers(3, 5), min_size=1, max_size=2))
        conv = (nn.Conv1d, nn.Conv2d)[len(spatial) - 1]
        groups = draw(st.sampled_from([1, 2]))
        options = {"groups": groups, "padding": 1, "bias": draw(st.booleans())}
        mode = draw(st.sampled_from(["zeros", "circular", "reflect"]))
        choices: list[Callable[[], nn.Module]] = [
            lambda: conv(width, width, 3, padding_mode=mode, **options),
            lambda: conv(width, width, 3, dilation=2, padding=2, groups=width),
            lambda: nn.GroupNorm(2, width),
            lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(spatial) - 1](width, affine=True),
            lambda: nn.LayerNorm(spatial),
            lambda: nn.Tanh(),
        ]
        tail = draw(st.sampled_from([nn.Identity, lambda: conv(width, 4, 2, stride=2)]))
        state = (width, *spatial)
        frames = draw(st.booleans())
        inputs = vectors(2, *state) if frames else vectors(*state)
    else:
        frames = False
        tail = draw(st.sampled_from([nn.Identity, lambda: nn.Linear(width, 3)]))
        choices = [
            lambda: nn.Linear(width, width),
            lambda: nn.Linear(width, width, bias=False),
            lambda: nn.LayerNorm(width),
            lambda: nn.RMSNorm(width),
            lambda: nn.Tanh(),
            lambda: Residual(nn.Linear(width, width)),
        ]
        if middle:
            choices.append(lambda: TimeFirst(nn.Linear(width, width)))
            choices.append(lambda: TimeFirst(nn.LayerNorm(width)))
        if kind == "ids":
            padding = draw(st.sampled_from([None, 0]))
            head = [lambda: nn.Embedding(5, width, padding_idx=padding)]
            inputs = words(*middle)
        else:
            inputs = vectors(*middle, width)
    picked = draw(st.lists(st.integers(0, len(choices) - 1), min_size=1, max_size=4))
    again = draw(st.booleans())
    frozen = draw(st.sets(st.integers(0, 7), max_size=3))

    def build() -> nn.Module:
        body: list[nn.Module] = [choices[k]() for k in picked]
        layers = [*(h() for h in head), *body, tail()]
        order = list(range(len(layers)))
        if again:  # every layer of the body is called twice
            order = [*order[: len(head)], *order[len(head) : -1] * 2, order[-1]]
        model: nn.Module = Stack(layers, order)
        parameters = list(model.parameters())
        for k in frozen:
            if k < len(parameters) - 1:
                parameters[k].requires_grad_(False)
        return Frames(model) if frames else model

    return build, inputs


def strided(x: Tensor, how: str) -> Tensor:
    """The same values in different memory."""
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "every other":
        padded = x.new_zeros(2 * x.shape[0], *x.shape[1:])
        padded[::2] = x
        return padded[::2]
    if how == "expanded":
        return x[:1].expand_as(x)
    return x


def require_exact(model: nn.Module, inputs: tuple[Tensor, ...], memory: Memory) -> None:
    batch = len(inputs[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = per_example_gradients(losses(model, inputs), trainable(model), memory)
    squares = found.squared_norms()
    weights = torch.linspace(0.5, 2, batch, dtype=torch.float64)
    sums, ours = found.weighted_sums(dict.fromkeys(squares, weights)), found.instantiate(slice(0, batch))
    truth = oracle(model, inputs)
    scale = max(float(g.norm()) for g in truth.values()) + 1e-30
    for name, g in truth.items():
        norms = g.reshape(batch, -1).norm(dim=1)
        assert (ours[name] - g).abs().max() <= 1e-10 * scale, name
        assert (squares[name].sqrt() - norms).abs().max() <= 1e-9 * scale, name
        assert (sums[name] - torch.einsum("b,b...->...", weights, g)).abs().max() <= 1e-9 * scale, name


@pytest.mark.slow
@THOROUGH
@given(
    models(),
    st.lists(st.integers(2, 8), min_size=2, max_size=4),
    st.sampled_from(["plain", "transposed", "every other", "expanded"]),
    st.booleans(),
)
def test_random_models_are_exact(
    drawn: tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]],
    batches: list[int],
    how: str,
    marked: bool,
) -> None:
    """One memory for batches of several sizes, so that findings are reused as well."""
    build, draw = drawn
    torch.manual_seed(0)
    model, memory = build().double(), Memory()
    if not trainable(model):
        return
    for batch in [*batches, batches[-1]]:
        inputs = tuple(
            strided(x.double(), how).requires_grad_(marked) if x.is_floating_point() else strided(x, how)
            for x in draw(batch)
        )
        require_exact(model, inputs, memory)


@pytest.mark.slow
@FEWER
@given(st.lists(st.tuples(st.integers(2, 6), st.integers(1, 6)), min_size=4, max_size=8), st.booleans())
def test_one_memory_through_changing_batches_and_lengths(sizes: list[tuple[int, int]], time_first: bool) -> None:
    """T = 1 and then more, T = B, T a multiple of B: earlier batches lead to no wrong decision."""
    torch.manual_seed(1)
    layers = [nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D), nn.Linear(D, D, bias=False)]
    body = nn.Sequential(*layers)
    model, memory = (TimeFirst(body) if time_first else body).double(), Memory()
    for batch, length in [(4, 1), (4, 1), *sizes, (3, 3), (2, 4)]:
        require_exact(model, (torch.randn(batch, length, D, dtype=torch.float64),), memory)


@pytest.mark.slow
@FEWER
@given(
    st.sampled_from(CASES),
    st.integers(2, 8),
    st.integers(1, 7),
    st.sampled_from(["clip", "normalize"]),
    st.sampled_from(["all", "layer", "tensor"]),
)
def test_pieces_of_a_batch_sum_to_the_whole(case: Case, batch: int, piece: int, mode: str, parts: str) -> None:
    model, inputs = case.build(), case.draw(batch)
    strategy = PerExample(max_norm=0.3, mode=mode, parts=parts)

    def total(method: str, size: int) -> dict[str, Tensor]:
        clipper = PerExample(strategy.max_norm, parts, mode=mode, method=method).attach(site(model))
        sums: dict[str, Tensor] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            for begin in range(0, batch, size):
                rows = tuple(x[begin : begin + size] for x in inputs)
                for name, t in clipper.clipped_sum(losses(model, rows)).items():
                    sums[name] = sums[name] + t if name in sums else t
        return sums

    whole = total("bookkeeping", batch)
    for other in (total("bookkeeping", piece), total("loop", batch)):
        for name, t in whole.items():
            torch.testing.assert_close(other[name], t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("keep", "chunk"), [(0, 2**30), (0, 1), (2**30, 1)])
@BY_NAME
def test_memory_limits_change_no_result(case: Case, keep: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients written out once, twice, or one example at a time."""
    model, inputs = case.build(), case.draw(4)
    weights = torch.linspace(0.5, 2, 4, dtype=torch.float64)

    def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            found = per_example_gradients(losses(model, inputs), trainable(model), Memory())
        return found.squared_norms(), found.weighted_sums(dict.fromkeys(trainable(model), weights))

    expected = both()
    monkeypatch.setattr(examples, "KEEP_BYTES", keep)
    monkeypatch.setattr(forms.base, "CHUNK_BYTES", chunk)
    torch.testing.assert_close(both(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
@BY_NAME
def test_layouts_are_trusted_after_two_batches(case: Case) -> None:
    """Otherwise every step would need a probe. The operations on a packed sequence depend on its lengths."""
    model, memory = case.build(), Memory()
    for seed in range(3):
        per_example_gradients(losses(model, case.draw(6, seed=seed)), trainable(model), memory)
    graph = walk(losses(model, case.draw(6, seed=9)), trainable(model))
    probed = memory.resolver.resolve(graph).gradients is not None
    assert probed == ("packed" in case.name)


class TimeFirstAndMasked(nn.Module):
    """Rows [T * B, d], some of which a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.a(x.transpose(0, 1)).tanh().transpose(0, 1) * mask[..., None]


@pytest.mark.parametrize("batches", [2, 5])
def test_ambiguous_layouts_are_trusted_until_they_differ(batches: int) -> None:
    """With T = 9 and B = 4, row 9 i belongs to example i both time first and batch first. If no other row has a
    gradient, either layout is right; once another row has one, a probe must decide."""
    torch.manual_seed(0)
    model, memory = TimeFirstAndMasked().double(), Memory()
    mask = (torch.arange(9) == 2 * torch.arange(4)[:, None]).double()
    for k in range(batches):
        require_exact(model, (torch.randn(4, 9, D, dtype=torch.float64), mask), memory)
        graph = walk(losses(model, (torch.randn(4, 9, D).double(), mask)), trainable(model))
        resolved = memory.resolver.resolve(graph)
        assert (resolved.gradients is None) == (k >= 1)
        assert k < 1 or resolved.doubts
    require_exact(model, (torch.randn(4, 9, D, dtype=torch.float64), torch.ones(4, 9).double()), memory)


# Rows that the data reorder


class Moved(nn.Module):
    """A layer, rows reordered in some way, another layer, and rows put back or reduced per example."""

    def __init__(self, move: str) -> None:
        super().__init__()
        self.a, self.b, self.move = nn.Linear(D, D), nn.Linear(D, 3), move

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        lengths = (x[..., 0] > 0).sum(1)
        if self.move == "sorted and put back":
            order = lengths.argsort(stable=True)
            return self.b(h[order])[order.argsort()]
        if self.move == "sorted by index_select":
            order = lengths.argsort(stable=True)
            return self.b(h.index_select(0, order)).index_select(0, order.argsort())
        if self.move == "gathered":
            order = x[..., 1].argsort(1)[..., None].expand_as(h)
            return self.b(h.gather(1, order))
        if self.move == "masked":
            mask = x[..., 0] > 0
            out = torch.zeros(*x.shape[:2], 3, dtype=x.dtype)
            out[mask] = self.b(h[mask])
            return out
        if self.move == "masked sum":
            mask = x[..., 0] > 0
            owner = mask.nonzero()[:, 0]
            return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, owner, self.b(h[mask]))
        if self.move == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(h, lengths.clamp_min(1), True, enforce_sorted=False)
            moved = packed._replace(data=self.b(packed.data))
            return nn.utils.rnn.pad_packed_sequence(moved, True, total_length=x.shape[1])[0]
        best = h.sum(2).topk(2, dim=1).indices[..., None].expand(-1, -1, D)
        return self.b(h.gather(1, best))


MOVES = ["sorted and put back", "sorted by index_select", "gathered", "masked", "masked sum", "packed", "topk"]


@pytest.mark.filterwarnings("error::clipwise.gradients.FallbackWarning")
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_rows_that_the_data_move_are_followed(move: str, marked: bool) -> None:
    """First batches in which nothing moves, then others, with one memory."""
    torch.manual_seed(0)
    model, memory = Moved(move).double(), Memory()
    still = torch.randn(4, 3, D, dtype=torch.float64)
    still[..., 0] = 1.0
    still[..., 1] = torch.arange(3.0)
    for x in [still, still + 0.01, still, *(torch.randn(B, 3, D, dtype=torch.float64) for B in (4, 5, 3, 6, 2, 30))]:
        x = x.clone().requires_grad_(marked)
        found = per_example_gradients(losses(model, (x,)), trainable(model), memory).instantiate(slice(0, len(x)))
        for name, g in oracle(model, (x.detach(),)).items():
            torch.testing.assert_close(found[name], g, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("move", ["gathered", "topk"])
def test_positions_that_move_within_an_example_are_no_reason_to_refuse(move: str) -> None:
    torch.manual_seed(0)
    model, memory = Moved(move).double(), Memory()
    for B in (4, 5, 3, 4):
        require_exact(model, (torch.randn(B, 3, D, dtype=torch.float64),), memory)


def test_the_order_of_the_losses_identifies_the_examples() -> None:
    """Losses in another order than the inputs are still one loss per example, each with its own gradient."""
    model, x = nn.Linear(D, 3).double(), torch.randn(4, D, dtype=torch.float64)
    shuffled = x[[2, 0, 3, 1]]
    ours = per_example_gradients(losses(model, (shuffled,)), trainable(model), Memory()).instantiate(slice(0, 4))
    plain = by_loop(losses(model, (x,)), trainable(model)).instantiate(slice(0, 4))
    for name, g in plain.items():
        torch.testing.assert_close(ours[name], g[[2, 0, 3, 1]])
