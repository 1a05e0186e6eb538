"""A step whose sums come from one traced graph gives the sums of an eager step, and falls back where it cannot.

Most tests run the traced operations one by one ("aot_eager"): the graph is that which Inductor compiles. Inductor
itself takes half a minute for each graph, so few tests use it, and these are marked as slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, PerExample, Private, make_private
from clipwise.engine import compiled, inductor
from clipwise.engine.captured import Captured
from clipwise.engine.compiled import CaptureWarning, CompiledStep
from clipwise.engine.traced_sum import TracedStep, TracedSum
from clipwise.engine.tracing import TraceError, trace
from clipwise.errors import UnsupportedModelError
from tests.engine.test_compiled import (
    BATCHES,
    Drawn,
    Recorded,
    coupled_run,
    drawn,
    exact_run,
    go,
    loss_with,
    ordinary,
    recorded,
    replays,
    require_close,
    with_record,
)
from tests.runs import SCHEMES, SIZE, data, losses_of, network, parameters, private_run, same, sgd

__all__ = ["drawn", "recorded"]

pytestmark = pytest.mark.usefixtures("one_thread")

C = 0.7
ROWS = 6


def traced(private: Private, model: nn.Module, backend: str = "aot_eager", size: int | None = None) -> CompiledStep:
    return private.compiled(loss_with(model), size, backend)


# ------------------------------------------------------------ exact, for several kinds of models


class Language(nn.Module):
    """One block of attention, with the head tied to the table."""

    def __init__(self, vocabulary: int = 11, width: int = 8, positions: int = 5) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        return (x @ self.table.weight.T).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(5, 8), nn.Linear(5, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        for p in self.base.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


class Standardised(nn.Module):
    """A convolution whose weight is standardised."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-4).sqrt()
        return self.head(F.relu(self.norm(F.conv2d(x, w, self.conv.bias))).mean((2, 3)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(),
        nn.Linear(6 * 4, 3),
    )  # fmt: skip


IMAGES = (2, 6, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (network, (5,)),
    "convolutional": (convolutional, IMAGES),
    "language": (Language, (5,)),
    "recurrent": (Recurrent, (4, 4)),
    "adapted": (Adapted, (5,)),
    "standardised": (Standardised, IMAGES),
}


def records(name: str, size: int = SIZE) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    shape = MODELS[name][1]
    if name == "language":
        x = torch.randint(0, 11, (size, *shape), generator=random)
        return TensorDataset(x, x.roll(-1, 1))
    x = torch.randn(size, *shape, generator=random, dtype=torch.float64) * 3
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=random))


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: (
        F.cross_entropy(model(x), y, reduction="none").flatten(1).mean(1)
        if y.dim() > 1
        else (F.cross_entropy(model(x), y, reduction="none"))
    )


def traced_sum(name: str, size: int = ROWS, **options: Any) -> tuple[nn.Module, TracedSum, TensorDataset]:
    torch.manual_seed(0)
    model, rows = MODELS[name][0]().double(), records(name)
    options = {"clipping": PerExample(C)} | options
    trainable = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    private = make_private(model, trainable, rows, batch_size=8, noise_multiplier=0, seed=1, **options)
    first = tuple(t[:size] for t in rows.tensors)
    return model, graph_of(private, loss_of(model), size, first), rows


def graph_of(private: Private, loss: Callable[..., Tensor], size: int, batch: tuple[Tensor, ...]) -> TracedSum:
    next(iter(private.loader.pieces()))  # the guards compare the model with what it was at a draw
    return TracedSum(private._context, loss, size, batch, run_by_torch=True)


def by_hand(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A separate forward pass for each example."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in range(len(batch[0])):
        loss = loss_of(model)(*(t[i : i + 1] for t in batch)).sum()
        each = torch.autograd.grad(loss, list(trained.values()))
        factor = min(1.0, C / float(torch.cat([g.flatten() for g in each]).norm()))
        for name, g in zip(total, each, strict=True):
            total[name] += factor * g
    return total


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_that_of_a_forward_pass_per_example(name: str) -> None:
    """On other rows than those of the trace, with padding, and after the weights have changed."""
    model, graph, rows = traced_sum(name)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    for count in (1, 4, ROWS):
        batch = tuple(t[20 : 20 + count] for t in rows.tensors)
        assert graph.takes(batch, count)
        found = graph.of(batch, count)
        for key, expected in by_hand(model, batch).items():
            torch.testing.assert_close(found[key], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_no_data_are_in_the_graph(name: str) -> None:
    """Traced with other rows, the graph is the same; its only tensors are those of the model, by reference."""
    model, _, rows = traced_sum(name)
    codes = []
    for begin in (0, 20):
        private = make_private(
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), rows,
            batch_size=8, noise_multiplier=0, clipping=PerExample(C),
        )  # fmt: skip
        batch = tuple(t[begin : begin + ROWS] for t in rows.tensors)
        graph = graph_of(private, loss_of(model), ROWS, batch)
        private.close()
        code = graph._run.graph  # type: ignore[attr-defined]
        codes.append(str(code))
        assert not [node for node in code.nodes if node.op == "get_attr"]
        held = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
        assert {t.data_ptr() for t in graph._lifted if t.numel() > 1} <= held
    assert codes[0] == codes[1]


# ------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_traced_step_gives_the_ordinary_sum(scheme: str, physical: int | None) -> None:
    options = {**SCHEMES[scheme], "max_physical_batch_size": physical}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    step = traced(private, model)
    go(private, step, 9)
    go(plain, ordinary(expected, plain), 9)
    require_close(model, expected)
    assert isinstance(step._captured, TracedStep) and step._replayed > 1


def test_empty_single_and_large_batches(drawn: Drawn) -> None:
    sizes = (4,) * 7 + (0, 1, 13, 0, 30)
    models = []
    for is_traced in (True, False):
        model, private = exact_run()
        drawn.set(*sizes)
        step = traced(private, model, size=6) if is_traced else ordinary(model, private)
        go(private, step, len(sizes))
        models.append(model)
        if isinstance(step, CompiledStep):
            assert step._replayed >= 5
    require_close(*models)


@pytest.mark.parametrize("method", ["bookkeeping", "instantiate", "reweight"])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_methods_and_parts(method: str, parts: str) -> None:
    options = {"clipping": PerExample(C, method=method, parts=parts)}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    step = traced(private, model)
    go(private, step, 8)
    go(plain, ordinary(expected, plain), 8)
    require_close(model, expected)
    assert step._captured is not None


@pytest.mark.parametrize("clipping", ["whole", "microbatches", "tensors"])
def test_microbatches(clipping: str) -> None:
    (model, private), (expected, plain) = (coupled_run(clipping=BATCHES[clipping]) for _ in range(2))
    step = traced(private, model)
    go(private, step, 10)
    go(plain, ordinary(expected, plain), 10)
    require_close(model, expected)
    assert step._replayed > 0


@pytest.mark.parametrize("physical", [None, 3])
def test_views_of_an_example_are_traced(physical: int | None) -> None:
    options = {"augmentation_multiplicity": 3, "max_physical_batch_size": physical}
    models = []
    for is_traced in (True, False):
        model, private = exact_run(**options)

        def loss(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            signs = 1 + torch.arange(len(x)) % 3  # each view is another one
            return losses_of(model, (x * signs[:, None], y))

        step: Callable[..., bool] = (
            private.compiled(loss, None, "aot_eager") if is_traced else lambda *b, p=private, f=loss: p.step(f(*b))  # type: ignore[misc]
        )
        go(private, step, 10)
        models.append(model)
        if isinstance(step, CompiledStep):
            assert step._replayed > 0
    require_close(*models)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_example_that_is_not_finite_contributes_zero(value: float) -> None:
    (model, private), (expected, plain) = (exact_run(with_record(17, value)) for _ in range(2))
    step = traced(private, model)
    go(private, step, 25)
    go(plain, ordinary(expected, plain), 25)
    require_close(model, expected)
    assert all(torch.isfinite(p).all() for p in model.parameters()) and step._replayed > 0


def test_inside_of_a_cuda_graph(recorded: list[Recorded]) -> None:
    """Stand-ins for the graphs run the traced sum."""
    (model, private), (expected, plain) = exact_run(), exact_run()
    step = traced(private, model)
    go(private, step, 10)
    go(plain, ordinary(expected, plain), 10)
    require_close(model, expected)
    assert isinstance(step._captured, Captured) and step._captured._traced is not None
    assert replays(recorded) > 0


def test_neighbours_move_the_sum_by_at_most_the_clip() -> None:
    _, graph, rows = traced_sum("convolutional")
    batch = tuple(t[10 : 10 + ROWS].clone() for t in rows.tensors)
    before = {name: t.clone() for name, t in graph.of(batch, ROWS).items()}
    for factor in (0.0, 1e-20, 1e3, 1e20, torch.inf, torch.nan):
        for changes in (lambda x, f=factor: x * f, lambda x, f=factor: torch.ones_like(x) * f):
            x = batch[0].clone()
            x[2] = changes(x[2])
            after = graph.of((x, batch[1]), ROWS)
            moved = torch.stack([(after[n] - before[n]).square().sum() for n in before]).sum().sqrt()
            assert float(moved) <= 2 * C * (1 + 1e-6)
    leaves = graph.of(tuple(t[1:] for t in batch), ROWS - 1)
    gone = torch.stack([(leaves[n] - before[n]).square().sum() for n in before]).sum().sqrt()
    assert 0 < float(gone) <= C * (1 + 1e-6)


# --------------------------------------------------------------------- fallbacks


def reads_a_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses_of(model, (x, y)) * (2.0 if float(x.sum()) > -1e9 else 1.0)


def chooses_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses_of(model, (x, y)) * (1 + 0 * len((x[:, 0] > 0).nonzero()))


def moves_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.argsort(y)
    return losses_of(model, (x[order], y[order]))[torch.argsort(order)]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [(reads_a_value, "reads a value"), (chooses_rows, "depends on the data"), (moves_rows, "data can move rows")],
)
def test_what_depends_on_values_falls_back_with_a_reason(loss: Callable[..., Tensor], reason: str) -> None:
    models = []
    for is_traced in (True, False):
        model, private = exact_run(probe_independence=False)
        step: Callable[..., bool] = (
            private.compiled(lambda x, y, m=model: loss(m, x, y), None, "aot_eager")
            if is_traced
            else lambda x, y, m=model, p=private: p.step(loss(m, x, y))  # type: ignore[misc]
        )
        if is_traced:
            with pytest.warns(CaptureWarning, match=f"runs eagerly: .*{reason}") as caught:
                go(private, step, 12)
            assert len([w for w in caught if w.category is CaptureWarning]) == 1
        else:
            go(private, step, 12)
        models.append(model)
    assert same(*map(parameters, models))


def test_each_form_falls_back_to_the_next(recorded: list[Recorded]) -> None:
    model, private = exact_run(probe_independence=False)
    step = private.compiled(lambda x, y: reads_a_value(model, x, y), None, "aot_eager")
    with pytest.warns(CaptureWarning, match="is captured without: .*reads a value"):
        go(private, step, 12)
    assert isinstance(step._captured, Captured) and step._captured._traced is None


def test_a_sum_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracedSum, "run", doubled := lambda self, run=TracedSum.run: _doubled(*run(self)))
    assert doubled is not None
    (model, private), (expected, plain) = exact_run(), exact_run()
    with pytest.warns(CaptureWarning, match="its sums differ"):
        go(private, traced(private, model), 12)
    go(plain, ordinary(expected, plain), 12)
    assert same(parameters(model), parameters(expected))


def _doubled(sums: dict[str, Tensor], rare: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {name: 2 * t for name, t in sums.items()}, rare


def test_a_weight_read_as_a_number_is_refused() -> None:
    """It would stay what it was at the trace."""
    model = network()
    x, y = data(6).tensors
    with pytest.raises(TraceError, match="reads a value"):
        trace(lambda x, y: [losses_of(model, (x, y)) * model[0].weight.sum().item()], (x, y), model)


def test_a_tensor_of_the_loss_is_an_input() -> None:
    """It may change in place between steps."""
    model, scale = network(), torch.ones(())
    x, y = data(6).tensors
    found = trace(lambda x, y: [losses_of(model, (x, y)).detach() * scale], (x, y), model)
    assert any(t is scale for t in found.lifted)
    scale.fill_(3.0)
    with torch.no_grad():
        ours = found.graph(x, y, *found.lifted)[0]
        torch.testing.assert_close(ours, 3 * losses_of(model, (x, y)))


def test_a_forward_pass_that_changes_a_buffer_is_not_traced() -> None:
    model = nn.BatchNorm1d(5)
    with pytest.raises(TraceError, match="in place"):
        trace(lambda x: [model(x)], (torch.randn(6, 5),), model)


def test_what_the_forward_pass_caches_stays_a_tensor_with_memory() -> None:
    class Caches(nn.Module):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(x.shape[1])
            return x * self.mask

    model = Caches()
    trace(lambda x: [model(x)], (torch.randn(6, 5),), model)
    assert model.mask is None


def test_products_of_the_norms_keep_their_arithmetic() -> None:
    """The user's switch for speed is around the step; norms and sums are stated for IEEE products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        model, private = private_run(seed=1)
        graph = graph_of(private, loss_with(model), 6, data(6).tensors)
        names = [str(node.target) for node in graph._run.graph.nodes]  # type: ignore[attr-defined]
        assert names.count("clipwise.ieee_mm.default") == 4  # the sums of weights and of biases
        assert names.count("aten.addmm.default") == 2 and names.count("aten.mm.default") == 1  # forward and backward
        expected = private._context.clipper.clipped_sum(losses_of(model, data(6).tensors))
        for name, found in graph.of(data(6).tensors, 6).items():
            torch.testing.assert_close(found, expected[name])
        torch.set_float32_matmul_precision("highest")
        assert not graph.is_current
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------ random layers, changes, backends


def dropped(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()


@pytest.mark.slow
def test_random_layers_draw_from_the_key_of_the_run() -> None:
    models = []
    for seed in (1, 2):  # torch's own seed has no effect on the replayed steps
        model = dropped()
        private = private_run(
            model, sgd(model), data(dtype=torch.float64), sampling="full", noise_multiplier=0, seed=5, epochs=20
        )[1]
        step = traced(private, model)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            go(private, step, 7)
            assert step._captured is not None
            torch.manual_seed(seed)
            go(private, step, 3)
        models.append(model)
    assert same(*map(parameters, models))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_attention_draws_random_numbers_only_with_dropout(rate: float) -> None:
    q = torch.randn(2, 1, 4, 8)
    attention = F.scaled_dot_product_attention
    found = trace(lambda x: [attention(x, x, x, dropout_p=rate)], [q], nn.Identity())
    assert found.is_random == (rate > 0)


def test_another_mode_is_traced_again() -> None:
    (model, private), (expected, plain) = exact_run(), exact_run()
    step = traced(private, model)
    go(private, step, 8)
    first = step._traced
    model.eval()
    expected.eval()
    go(private, step, 8)
    go(plain, ordinary(expected, plain), 16)
    require_close(model, expected)
    assert step._captured is not None and step._traced is not first


def test_guards_run_on_traced_steps() -> None:
    model, private = exact_run()
    step = traced(private, model)
    go(private, step, 8)
    assert step._captured is not None
    batch = next(iter(private.loader))
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(UnsupportedModelError, match="was set or changed between the draw"):
        step(*batch)


@pytest.mark.parametrize("is_faster", [True, False])
def test_on_a_cpu_auto_compiles_when_it_pays(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_WORTHWHILE", 0.0)
    monkeypatch.setattr(inductor, "is_available", lambda kind: True)
    monkeypatch.setattr(inductor, "compiled", lambda found, inputs: found.graph)
    monkeypatch.setattr(TracedSum, "slower", property(lambda self: 0.5 if is_faster else 2.0, lambda *_: None), False)
    model, private = exact_run()
    step = private.compiled(loss_with(model))
    go(private, step, 9)
    assert (step._captured is not None) == is_faster


def test_short_runs_on_a_cpu_are_not_compiled() -> None:
    model, private = exact_run()
    step = private.compiled(loss_with(model))
    go(private, step, 9)
    assert step._traced is None and step._captured is None


def test_without_a_compiler_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    inductor.is_available.cache_clear()
    try:
        model, private = exact_run()
        assert private.compiled(loss_with(model))._stays_eager
    finally:
        inductor.is_available.cache_clear()


# ---------------------------------------------------------------- Inductor itself


@pytest.mark.slow
def test_inductor_gives_the_sums_of_eager_steps(caplog: pytest.LogCaptureFixture) -> None:
    if not inductor.is_available("cpu"):
        pytest.skip("needs a C++ compiler")
    options = {"clipping": PerExample(C), "noise_multiplier": 0, "seed": 3, "epochs": 9}
    models = []
    for is_compiled in (True, False):
        dataset = TensorDataset(*(t.clone() for t in data().tensors))
        dataset.tensors[0][17] = torch.nan
        model = network()
        _, private = private_run(model, sgd(model), dataset, **options)
        step = traced(private, model, "inductor") if is_compiled else ordinary(model, private)
        with caplog.at_level("INFO", "clipwise"):
            go(private, step, 20)
        models.append(model)
        if isinstance(step, CompiledStep):
            assert step._replayed > 3
            assert len([m for m in caplog.messages if m.startswith("Compiling")]) == 1
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Signed(nn.Module):
    """Its positions have alternating signs: equal ones cancel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.sigmoid(self.norm(self.a(x))))
        return (h * (1 - 2.0 * (torch.arange(x.shape[1]) % 2))[:, None] * x[..., :1].exp()).flatten(1).sum(1)


@pytest.mark.slow
def test_inductor_bounds_an_example_whose_positions_cancel() -> None:
    """The gradient that is measured is the one that is summed, also where it is rounding error alone."""
    if not inductor.is_available("cpu"):
        pytest.skip("needs a C++ compiler")
    norm, model = 1e-3, Signed()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, 4, generator=random)
    _, private = private_run(model, sgd(model), TensorDataset(x), clipping=PerExample(norm), probe_independence=False)
    next(iter(private.loader))
    graph = TracedSum(private._context, model, 3, (x[:3],))
    kept = 0
    for i in range(36):
        alike = x[i, :1].expand(4, 4).clone()
        alike[:, 0] = 4.0 * (i % 5)  # scales the gradient of each position
        alike[1:] += x[i, 1:] * (0.0, 1e-7, 1e-5, 1e-3)[i % 4]
        graph.rows.fill((alike[None],), 1)
        sums, rare = graph.run()
        if not bool(rare):
            kept += 1
            found = float(torch.stack([t.double().square().sum() for t in sums.values()]).sum().sqrt())
            assert found <= norm * (1 + 1e-4)
    assert kept > 5


@pytest.mark.slow
def test_inductor_rounds_no_sum_within_autocast() -> None:
    if not inductor.is_available("cpu"):
        pytest.skip("needs a C++ compiler")
    model, private = private_run()
    next(iter(private.loader))
    with torch.autocast("cpu", torch.bfloat16):
        graph = TracedSum(private._context, loss_with(model), 6, data(6).tensors)
        graph.rows.fill(data(6).tensors, 6)
        sums, _ = graph.run()
    for found in sums.values():
        assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())


@pytest.mark.slow
def test_inductor_finds_a_step_that_it_compiled_before() -> None:
    if not inductor.is_available("cpu"):
        pytest.skip("needs a C++ compiler")
    from torch._dynamo.utils import counters

    hits = []
    for _ in range(2):
        counters.clear()
        model, private = private_run()
        next(iter(private.loader))
        TracedSum(private._context, loss_with(model), 6, data(6).tensors)
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits[1] >= 1


def test_batch_needs_no_exactness_per_example() -> None:
    """A strategy for whole microbatches may use batch norm in a traced graph."""
    model, private = coupled_run(clipping=Batch(C))
    step = traced(private, model)
    go(private, step, 8)
    assert step._captured is not None
