"""A compiled step is an ordinary step: on a CPU always, and where it is captured, up to rounding.

There are no CUDA graphs on a CPU. A graph is work that is recorded once and then done again on the same memory, so
here a function that is called again takes its place (`recorded`). Real graphs are tested by tests/gpu/compiled.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, PerExample, Private, Quantile, layers, make_private
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive, Multipliers
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.noised_statistics import NoisedStatistics
from clipwise.clipping.public import PublicData
from clipwise.engine import captured, compiled, cuda_graphs, describe
from clipwise.engine import step as pipeline
from clipwise.engine.compiled import CaptureWarning, CompiledStep
from clipwise.engine.context import StepContext
from clipwise.errors import BudgetExhausted, ConfigurationError, PrivacyWarning, StepError, UnsupportedModelError
from clipwise.kernels.noise import normals
from clipwise.ledger.ledger import MemoryLedger
from clipwise.noise.gaussian import key_words
from clipwise.optim.averaging import AveragedParameters
from clipwise.sampling.schemes import Poisson
from tests.runs import (
    FEATURES,
    SCHEMES,
    SIZE,
    clipped_sum_by_hand,
    data,
    gradients,
    losses_of,
    network,
    parameters,
    private_run,
    same,
    sgd,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded:
    """Takes the place of a CUDA graph: calls the same function again."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._act()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Steps on the CPU are captured; what was."""
    graphs: list[Recorded] = []

    def capture(act: Callable[[], Any], device: torch.device, warm: bool = True) -> Recorded:
        if warm:  # as a capture does; what happens while it records is not done
            act()
            act()
        graphs.append(Recorded(act))
        return graphs[-1]

    monkeypatch.setattr(compiled, "_can_capture", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "capture", capture)
    return graphs


def loss_with(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: losses_of(model, (x, y))


def go(private: Private, step: Callable[..., bool], updates: int) -> None:
    """So many updates, over as many epochs as that takes."""
    while updates > 0:
        for batch in private.loader.pieces():
            updates -= step(*batch)
            if updates == 0:
                return


def ordinary(model: nn.Module, private: Private) -> Callable[..., bool]:
    loss = loss_with(model)
    return lambda *batch: private.step(loss(*batch))


def exact_run(dataset: Any = None, **options: Any) -> tuple[nn.Module, Private]:
    """In float64 and without noise, so that sums computed in two ways can be compared exactly."""
    model = network(torch.float64)
    defaults = {"noise_multiplier": 0, "seed": 3, "clipping": PerExample(0.7)}
    optimizer = options.pop("optimizer", sgd)(model)
    return private_run(model, optimizer, dataset or data(dtype=torch.float64), **(defaults | {"epochs": 9} | options))


def require_close(model: nn.Module, other: nn.Module) -> None:
    require_close_to(model, other, 1e-9)


def require_close_to(model: nn.Module, other: nn.Module, share: float) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=share, atol=share / 100)


def replays(graphs: list[Recorded]) -> int:
    return sum(graph.replays for graph in graphs)


# Where nothing can be captured


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu_it_is_the_ordinary_step_bit_for_bit(scheme: str, physical: int | None) -> None:
    found = []
    for is_compiled in (True, False):
        model, private = private_run(seed=1, max_physical_batch_size=physical, **SCHEMES[scheme])
        step = private.compiled(loss_with(model)) if is_compiled else ordinary(model, private)
        go(private, step, 7)
        found.append(parameters(model) | {"steps": torch.tensor(private.steps)})
    assert same(*found)


class Drawn:
    """Replaces the draw of a Poisson scheme."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def set(self, *sizes: int) -> None:
        left = list(sizes)
        self._monkeypatch.setattr(Poisson, "draw", lambda *_: torch.arange(left.pop(0) if left else 8).numpy())


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)


def test_empty_draws_release_and_count(drawn: Drawn) -> None:
    model, private = private_run(seed=1)
    drawn.set(0, 5, 0, 0)
    go(private, private.compiled(loss_with(model)), 4)
    assert private.steps == 4
    assert all(bool(g.any()) for g in gradients(model).values())


def test_bounds_that_move_are_never_captured(recorded: list[Recorded]) -> None:
    model, private = private_run(clipping=PerExample(Quantile()), noise_multiplier=0.5, batch_size=20)
    go(private, private.compiled(loss_with(model)), 8)
    assert recorded == []
    assert private.steps == 8


# What is refused


def test_a_step_needs_a_batch_that_was_handed_out() -> None:
    model, private = private_run()
    step = private.compiled(loss_with(model))
    with pytest.raises(StepError, match="without a new batch"):
        step(*data()[:8])
    batch = next(iter(private.loader))
    step(*batch)
    with pytest.raises(StepError, match="without a new batch"):
        step(*batch)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    "change",
    {
        "one less": lambda x, y: (x[1:], y[1:]),
        "repeated": lambda x, y: (x.repeat(2, 1), y.repeat(2)),
        "of two sizes": lambda x, y: (x, y[1:]),
        "no rows": lambda x, y: (x.sum(), y.sum()),
        "nothing": lambda x, y: (),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_batch_of_another_size_is_refused(
    change: tuple[str, Any], is_captured: bool, recorded: list[Recorded]
) -> None:
    model, private = exact_run(sampling="fixed-size")
    step = private.compiled(loss_with(model))
    if is_captured:
        go(private, step, 6)
        assert replays(recorded) > 0
    before, steps = parameters(model), private.steps
    batch = next(iter(private.loader))
    with pytest.raises(StepError, match=r"last batch of private\.loader"):
        step(*change[1](*batch))
    assert same(parameters(model), before) and private.steps == steps
    assert step(*batch)


def test_a_closed_run_is_refused(recorded: list[Recorded]) -> None:
    model, private = exact_run()
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    batch = next(iter(private.loader))
    private.close()
    with pytest.raises(StepError, match="closed"):
        step(*batch)


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_budget_ends_compiled_steps_too(is_captured: bool, request: pytest.FixtureRequest) -> None:
    if is_captured:
        request.getfixturevalue("recorded")
    model, private = private_run(epsilon=3.0, delta=1e-5, steps=6)
    step = private.compiled(loss_with(model))
    with pytest.raises(BudgetExhausted):
        go(private, step, 100)
    assert private.steps >= 6
    steps, before = private.steps, parameters(model)
    with pytest.raises(BudgetExhausted):
        go(private, step, 1)
    assert private.steps == steps and same(parameters(model), before)
    assert private.spent().epsilon <= 3.0


@pytest.mark.parametrize("size", [0, 1, -3, 2.5, True, "8"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    model, private = private_run()
    with pytest.raises(ConfigurationError, match="size"):
        private.compiled(loss_with(model), size)


# What a captured step computes


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("size", [2, 3, 5, SIZE + 9, None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_captured_step_gives_the_ordinary_sum(
    scheme: str, size: int | None, physical: int | None, recorded: list[Recorded]
) -> None:
    options = {**SCHEMES[scheme], "max_physical_batch_size": physical}
    model, private = exact_run(**options)
    expected, plain = exact_run(**options)
    go(private, private.compiled(loss_with(model), size), 9)
    go(plain, ordinary(expected, plain), 9)
    require_close(model, expected)
    gather, release, *_ = recorded
    assert release.replays > 1 and gather.replays >= release.replays


def test_empty_and_single_draws_go_through_the_graphs(recorded: list[Recorded], drawn: Drawn) -> None:
    sizes = (4, 4, 4, 4, 4, 0, 1, 13, 0, 30)
    runs = []
    for is_compiled in (True, False):
        model, private = exact_run()
        drawn.set(*sizes)
        go(private, private.compiled(loss_with(model), 6) if is_compiled else ordinary(model, private), len(sizes))
        runs.append(model)
    require_close(*runs)
    gather, release, *_ = recorded
    assert gather.replays == 1 + 0 + 1 + 3 + 0 + 5
    assert release.replays == 6


def test_it_is_not_captured_before_batches_of_two_examples(recorded: list[Recorded], drawn: Drawn) -> None:
    model, private = exact_run()
    drawn.set(0, 1, 0, 1, 1, 1, 0, 2, 2, 2, 2, 0, 0, 2)
    step = private.compiled(loss_with(model))
    for _ in range(13):
        go(private, step, 1)
        assert recorded == []
    go(private, step, 1)
    assert recorded


def test_rows_that_fill_up_weigh_nothing(recorded: list[Recorded]) -> None:
    """Their examples are clipped, not 0: if they weighed anything it would show."""
    model, private = exact_run(sampling="fixed-size")
    step = private.compiled(loss_with(model), 13)
    go(private, step, 6)
    batch = next(iter(private.loader))
    indices = private.loader.current.indices.tolist()
    names = tuple(dict(model.named_parameters()))
    total = clipped_sum_by_hand(model, private._context.plan.dataset, indices, {names: 0.7})
    step(*batch)
    for name, g in gradients(model).items():
        torch.testing.assert_close(g * 8, total[name], rtol=1e-9, atol=1e-11)
        assert float(total[name].norm()) > 0.01


@pytest.mark.parametrize("method", ["bookkeeping", "instantiate", "reweight", "vmap"])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_every_method_and_part(method: str, parts: str, recorded: list[Recorded]) -> None:
    options = {"clipping": PerExample(0.7, method=method, parts=parts)}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    go(private, private.compiled(loss_with(model)), 8)
    go(plain, ordinary(expected, plain), 8)
    require_close(model, expected)
    assert replays(recorded) > 0


# Microbatches, which are neither cut nor padded


def coupled_network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    layers.without_running_statistics(model)  # those of a batch see every row
    return model


def coupled_run(dataset: TensorDataset | None = None, **options: Any) -> tuple[nn.Module, Private]:
    model = coupled_network()
    defaults = {"noise_multiplier": 0, "seed": 3, "epochs": 20, "sampling": "fixed-size"}
    return private_run(
        model, sgd(model), dataset or data(dtype=torch.float64), **(defaults | {"batch_size": 8} | options)
    )


def of_public(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses_of(model, (x, y))


PUBLIC = PublicData(data(12, torch.float64, seed=5), of_public, name="others")
BATCHES: dict[str, Batch] = {
    "whole": Batch(0.7),
    "microbatches": Batch(0.7, microbatches=4),
    "tensors": Batch(0.7, microbatches=2, parts="tensor"),
    "scaled": Batch(0.1, 2, Multipliers(PUBLIC, of="microbatch", microbatch_size=4, groups="tensor", every=None)),
}


def trained_both_ways(updates: int, is_one_number: bool, **options: Any) -> CompiledStep:
    """The step that ended where ordinary ones end, with one loss per example or with their mean."""
    (model, private), (expected, plain) = coupled_run(**options), coupled_run(**options)
    loss = loss_with(model)
    step = private.compiled(lambda *batch: loss(*batch).mean() if is_one_number else loss(*batch))
    go(private, step, updates)
    go(plain, ordinary(expected, plain), updates)
    require_close(model, expected)
    return step


@pytest.mark.parametrize("is_one_number", [False, True])
@pytest.mark.parametrize("clipping", BATCHES)
def test_microbatches_of_one_size_are_captured(clipping: str, is_one_number: bool, recorded: list[Recorded]) -> None:
    trained_both_ways(12, is_one_number, clipping=BATCHES[clipping])
    gather, release, *_ = recorded
    assert release.replays > 1 and gather.replays == BATCHES[clipping].microbatches * release.replays


@pytest.mark.parametrize("is_one_number", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_microbatch_of_another_size_is_gathered_eagerly(
    seed: int, is_one_number: bool, recorded: list[Recorded]
) -> None:
    """40 records in blocks of 7: one has 5. Rows that fill it up would move the statistics of its batch norm."""
    options = {"clipping": Batch(0.7), "sampling": "partition", "batch_size": 7, "seed": seed}
    step = trained_both_ways(30, is_one_number, **options)
    gather, release, *_ = recorded
    assert 0 < gather.replays < release.replays
    assert step._captured._size == 7  # and not 5, whatever came when it was captured


def test_a_microbatch_gathered_eagerly_must_not_change_buffers(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 5:
                self.seen.copy_(x.detach().mean(0))
            return super().forward(x)

    model = Keeps(*coupled_network())
    model.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.float64))
    options: dict[str, Any] = {"sampling": "partition", "batch_size": 7, "seed": 0, "epochs": 20}
    private = private_run(model, sgd(model), data(dtype=torch.float64), clipping=Batch(0.7), **options)[1]
    blocks = iter([7, 7, 7, 7, 7, 7, 5, 7])
    draw = type(private._context.scheme).draw
    by_size = {len(rows): rows for rows in (draw(private._context.scheme, bytes([i]) * 32, b"", 0) for i in range(99))}
    monkeypatch.setattr(type(private._context.scheme), "draw", lambda *_: by_size[next(blocks)])
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    assert recorded
    with pytest.raises(UnsupportedModelError, match="'seen'"):
        go(private, step, 2)


def test_microbatches_that_a_shuffle_makes_are_never_captured(recorded: list[Recorded]) -> None:
    """Record i is in microbatch i mod k, so of 8 records in random order it may have none or many."""
    model, private = coupled_run(clipping=Batch(0.7, microbatches=4), sampling="shuffled")
    go(private, private.compiled(loss_with(model)), 80)
    assert recorded == []


def test_what_was_gathered_of_an_earlier_batch_is_no_part_of_the_next(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first microbatch is empty. The second is not finite and is gathered again, added to no earlier sum."""
    odd = np.array([1, 2, 3, 6, 7, 10, 11, 17])  # none is a multiple of 4; 1 and 17 are one microbatch
    models = []
    for is_compiled in (True, False):
        model, private = coupled_run(with_record(17, torch.nan), clipping=Batch(0.7, microbatches=4))
        step = private.compiled(loss_with(model)) if is_compiled else ordinary(model, private)
        go(private, step, 6)
        with monkeypatch.context() as patch:
            patch.setattr(type(private._context.scheme), "draw", lambda *_: odd)
            go(private, step, 1)
        models.append(model)
    require_close(*models)
    assert replays(recorded) > 0


NOT_CAPTURED: dict[str, Any] = {
    "frozen entries": {"clipping": PerExample(0.7, sparse=Sparse(every=40))},
    "frozen entries of means": {"clipping": Batch(0.7, sparse=Sparse(every=40))},
    "released statistics": {"clipping": Batch(0.7, running_statistics=NoisedStatistics())},
    "users": {"clipping": Batch(0.7), "group": [i // 2 for i in range(SIZE)], "batch_size": 4},
}


@pytest.mark.parametrize("what", NOT_CAPTURED)
def test_what_a_graph_cannot_hold_is_never_captured(what: str, recorded: list[Recorded]) -> None:
    options = {"noise_multiplier": 1.0} | NOT_CAPTURED[what]
    model, private = (
        coupled_run(**options) if what == "released statistics" else exact_run(**({"sampling": "fixed-size"} | options))
    )
    go(private, private.compiled(loss_with(model)), 12)
    assert recorded == []


@pytest.mark.parametrize("sampling", ["poisson", "truncated-poisson"])
def test_microbatches_of_random_sizes_are_never_captured(sampling: str, recorded: list[Recorded]) -> None:
    model, private = coupled_run(clipping=Batch(0.7, microbatches=2), sampling=sampling)
    go(private, private.compiled(loss_with(model)), 12)
    assert recorded == []


def test_sums_of_microbatches_are_formed_in_float64(recorded: list[Recorded]) -> None:
    model, private = private_run(clipping=Batch(0.7, microbatches=4), sampling="fixed-size")
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    assert recorded and {t.dtype for t in step._captured._sums} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_microbatch_that_is_not_finite_contributes_zero(value: float, recorded: list[Recorded]) -> None:
    options = {"clipping": Batch(0.7, microbatches=4)}
    (model, private), (expected, plain) = (coupled_run(with_record(17, value), **options) for _ in range(2))
    go(private, private.compiled(loss_with(model)), 25)
    go(plain, ordinary(expected, plain), 25)
    require_close(model, expected)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert replays(recorded) > 0


def test_averaged_parameters_follow_a_captured_update(recorded: list[Recorded]) -> None:
    found = []
    for is_compiled in (True, False):
        model = network(torch.float64)
        averages = AveragedParameters(model, 0.5)
        private = make_private(
            model,
            sgd(model),
            data(dtype=torch.float64),
            clipping=PerExample(0.7),
            batch_size=8,
            sampling="fixed-size",
            noise_multiplier=0,
            seed=3,
            ema=averages,
        )
        step = private.compiled(loss_with(model)) if is_compiled else ordinary(model, private)
        go(private, step, 9)
        with averages.applied():
            found.append(parameters(model))
    for name, p in found[0].items():
        torch.testing.assert_close(p, found[1][name], rtol=1e-9, atol=1e-11)
    assert replays(recorded) > 0


# Bounds that stay for a while

LASTING: dict[str, Any] = {
    "examples, measured": PerExample(0.7, parts=Adaptive(PUBLIC, every=9)),
    "examples, decaying": PerExample(NormDecay(0.7, 0.5, every=9)),
    "batch, measured": Batch(0.7, parts=Adaptive(PUBLIC, of="microbatch", microbatch_size=4, every=9)),
    "batch, decaying": Batch(NormDecay(0.7, 0.5, every=9), microbatches=2),
}


@pytest.mark.parametrize("clipping", LASTING)
def test_steps_are_captured_again_when_bounds_have_changed(
    clipping: str, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_LASTING", 9)
    options = {"clipping": LASTING[clipping], "sampling": "fixed-size", "noise_multiplier": 1e-9}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    seen = []
    for run, step in ((private, private.compiled(loss_with(model))), (plain, ordinary(expected, plain))):
        go(run, step, 30)
        seen.append(run.parts())
    require_close_to(model, expected, 1e-6)
    # After 9, 18 and 27 releases; the noise follows the bounds, and is that of ordinary steps.
    assert sum(graph.replays > 0 for graph in recorded) >= 6  # two graphs each time
    for ours, theirs in zip(*seen, strict=True):
        assert ours.noise_std == pytest.approx(theirs.noise_std, rel=1e-6)
        assert ours.sensitivity == pytest.approx(theirs.sensitivity, rel=1e-6)
    first = private_run(network(torch.float64), None, data(dtype=torch.float64), **options)[1].parts()
    assert seen[0] != first


def test_bounds_that_do_not_last_are_never_captured(recorded: list[Recorded]) -> None:
    for clipping in (PerExample(NormDecay(0.7, 0.9, every=9)), PerExample(0.7, parts=Adaptive(PUBLIC, every=1))):
        model, private = exact_run(clipping=clipping)
        go(private, private.compiled(loss_with(model)), 12)
    assert recorded == []


# What hardly ever happens


def with_record(i: int, value: float) -> TensorDataset:
    x, y = data(dtype=torch.float64).tensors
    x = x.clone()
    x[i] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize("physical", [None, 9])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_example_that_is_not_finite_contributes_zero(
    value: float, physical: int | None, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    gather_again = captured.Captured._gather_again
    monkeypatch.setattr(
        captured.Captured, "_gather_again", lambda *a: again.append(a[0]._context.ledger.position) or gather_again(*a)
    )
    options = {"sampling": "full", "max_physical_batch_size": physical}
    model, private = exact_run(with_record(17, value), **options)
    step = private.compiled(loss_with(model), 7)
    go(private, step, 9)
    assert not any(t.requires_grad for t in step._captured._rows.batch)
    expected, plain = exact_run(with_record(17, value), **options)
    go(plain, ordinary(expected, plain), 9)
    require_close(model, expected)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    _, release, *_ = recorded
    # Each step once, and only the piece that it is in. In the first step other pieces may have rules to compare.
    first, *later = sorted(set(again))
    assert release.replays == 1 + len(later) > 1 and again.count(first) >= 1
    assert all(again.count(step) == 1 for step in later)


class Positions(nn.Module):
    """A linear layer whose gradient is measured by inner products of its positions, and never written out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        signs = 1 - 2.0 * (torch.arange(x.shape[1]) % 2)
        return (self.a(x) * signs[:, None] * torch.linspace(0.5, 2, 48)).flatten(1).sum(1)


def cancelling_data() -> TensorDataset:
    """Of one example all positions are alike, and cancel."""
    torch.manual_seed(1)
    x = torch.randn(12, 8, 64)
    x[5] = x[5, :1]
    return TensorDataset(x * 10)


def test_an_example_whose_positions_cancel_is_gathered_again(recorded: list[Recorded]) -> None:
    """Bit for bit: then it is the ordinary step that gathers."""
    found = []
    for is_compiled in (True, False):
        model = Positions()
        _, private = private_run(
            model,
            sgd(model, 1e-4),
            cancelling_data(),
            sampling="full",
            noise_multiplier=0,
            clipping=PerExample(0.3, method="bookkeeping"),
        )
        step: Callable[..., bool] = lambda *batch, m=model, p=private: p.step(m(*batch))  # noqa: E731
        go(private, private.compiled(model) if is_compiled else step, 7)
        found.append(parameters(model))
    assert recorded[0].replays == 3
    assert same(*found)


def test_the_test_above_can_fail(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading the deferred checks the cancelling example is not gathered again."""
    asked: list[bool] = []
    monkeypatch.setattr(
        captured.Captured, "_gather_again", lambda self, *_: asked.append(bool(self._rare)) or self._clear()
    )
    model = Positions()
    _, private = private_run(
        model,
        sgd(model, 1e-4),
        cancelling_data(),
        sampling="full",
        noise_multiplier=0,
        clipping=PerExample(0.3, method="bookkeeping"),
    )
    go(private, private.compiled(model), 7)
    assert asked == [True] * 3
    assert not any(bool(g.any()) for g in gradients(model).values())


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(1, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[..., None]).sin().flatten(1).sum(1)


def test_rows_of_another_shape_or_type_are_gathered_by_ordinary_steps(recorded: list[Recorded]) -> None:
    """Also where they would broadcast: a batch of texts of one word."""
    shapes: list[tuple[int, torch.dtype]] = [(5, torch.float64)] * 6
    shapes += [(1, torch.float64), (5, torch.float32), (7, torch.float64), (5, torch.float64)]

    def collate(shape: tuple[int, torch.dtype]) -> Callable[[list[Tensor]], tuple[Tensor]]:
        return lambda rows: (torch.stack(rows)[:, : shape[0]].to(shape[1]),)

    runs = []
    for is_compiled in (True, False):
        model, made = Texts(), list[Private]()
        texts = [torch.linspace(-1, 1, 7).double() * i for i in range(1, 9)]
        _, private = private_run(
            model,
            sgd(model),
            texts,
            sampling="full",
            noise_multiplier=0,
            clipping=PerExample(0.4),
            collate_fn=lambda rows, made=made: collate(shapes[min(made[0].steps, 9) if made else 0])(rows),
        )
        made.append(private)
        step: Callable[..., bool] = lambda x, m=model, p=private: p.step(m(x.double()))  # noqa: E731
        go(private, private.compiled(lambda x, m=model: m(x.double())) if is_compiled else step, len(shapes))
        runs.append(model)
    require_close(*runs)
    assert recorded[0].replays == 3 and recorded[1].replays == 6


def test_a_number_beside_the_rows_is_no_row(recorded: list[Recorded]) -> None:
    made: list[Private] = []

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        x, y = (torch.stack(side) for side in zip(*rows, strict=True))
        return torch.linspace(1, 3, 50).double()[made[-1].steps if made else 0], x, y

    runs = []
    for is_compiled in (True, False):
        model, private = exact_run(
            sampling="full", collate_fn=collate, clipping=PerExample(50.0), probe_independence=False
        )
        made.append(private)
        loss = lambda factor, x, y, m=model: factor * losses_of(m, (x, y))  # noqa: E731
        step: Callable[..., bool] = lambda *batch, p=private, f=loss: p.step(f(*batch))  # noqa: E731
        go(private, private.compiled(loss) if is_compiled else step, 8)
        runs.append(model)
    require_close(*runs)
    assert replays(recorded) > 0


def in_other_order(x: Tensor, z: Tensor) -> dict[str, Tensor | None]:
    return {"z": z, "x": x, "w": None}


def in_another_place(x: Tensor, z: Tensor) -> dict[str, Tensor | None]:
    return {"x": x, "z": None, "w": z}


@pytest.mark.parametrize("later", [in_other_order, in_another_place])
def test_tensors_at_other_places_of_the_batch_are_gathered_by_ordinary_steps(
    later: Callable[[Tensor, Tensor], dict[str, Tensor | None]], recorded: list[Recorded]
) -> None:
    """Rows of the same shape and type, which a graph would take one for another."""
    torch.manual_seed(1)
    rows = TensorDataset(*torch.randn(2, 12, 3, dtype=torch.float64))
    runs = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model, made = nn.Linear(3, 3).double(), list[Private]()

        def collate(rows: list[tuple[Tensor, Tensor]], made: list[Private] = made) -> tuple[Any]:
            x, z = (torch.stack(side) for side in zip(*rows, strict=True))
            is_usual = not made or made[0].steps % 10 < 9
            return ({"x": x, "z": z, "w": None} if is_usual else later(x, z),)

        def loss(batch: dict[str, Tensor | None], m: nn.Module = model) -> Tensor:
            z, w = batch["z"], batch["w"]
            found: Tensor = m(batch["x"]).sin().sum(1) if z is None else (m(batch["x"]) * z).sum(1)
            return found if w is None else found + w.sum(1) * m(w).sum(1)

        _, private = private_run(
            model, sgd(model), rows, sampling="full", noise_multiplier=0, collate_fn=collate, epochs=30
        )
        made.append(private)

        def ordinarily(batch: Any, private: Private = private, loss: Any = loss) -> bool:
            return private.step(loss(batch))

        go(private, private.compiled(loss) if is_compiled else ordinarily, 24)
        runs.append(model)
    require_close(*runs)
    assert replays(recorded) > 0


# Where it cannot be captured


def test_a_step_that_cannot_be_captured_warns_once_and_runs_eagerly(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(act: object, device: object, warm: bool = True) -> None:
        raise RuntimeError("no graph for this\nand so on")

    monkeypatch.setattr(cuda_graphs, "capture", refuse)
    model, private = private_run(seed=1)
    step = private.compiled(loss_with(model))
    with pytest.warns(CaptureWarning, match="runs eagerly: no graph for this$") as caught:
        go(private, step, 12)
    assert len([w for w in caught if w.category is CaptureWarning]) == 1
    expected, plain = private_run(seed=1)
    go(plain, ordinary(expected, plain), 12)
    assert same(parameters(model), parameters(expected))


def test_what_is_no_tensor_would_stay_what_it_was(recorded: list[Recorded]) -> None:
    model, private = exact_run(
        sampling="full", collate_fn=lambda rows: (*(torch.stack(side) for side in zip(*rows, strict=True)), 2.0)
    )
    with pytest.warns(CaptureWarning, match="not tensors"):
        go(private, private.compiled(lambda x, y, factor: factor * losses_of(model, (x, y))), 9)
    assert recorded == []


# Noise, secrets and the ledger


def wide_network() -> nn.Sequential:
    """With enough weights to estimate the size of the noise."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 400), nn.Tanh(), nn.Linear(400, 3)).double()


def test_the_noise_is_that_of_the_steps_key_and_has_the_stated_size(recorded: list[Recorded]) -> None:
    wide = wide_network()
    model, private = private_run(
        wide,
        sgd(wide, 0.0),
        data(dtype=torch.float64),
        noise_multiplier=1.3,
        seed=5,
        clipping=PerExample(0.5, parts="layer"),
    )
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    seen = []
    for batch in private.loader:
        indices, key = private.loader.current.indices.tolist(), private._context.keys.key.copy()
        groups = {part.parameters: part.sensitivity for part in private.parts()}
        total = clipped_sum_by_hand(model, private._context.plan.dataset, indices, groups)
        step(*batch)
        for number, part in enumerate(private.parts()):
            noise = torch.cat([(model.get_parameter(n).grad * 8 - total[n]).flatten() for n in part.parameters])
            words = key_words(key.derive(f"noise/{number}/0/0"))
            expected = normals(words, len(noise), part.noise_std, torch.float64)
            torch.testing.assert_close(noise, expected, rtol=1e-9, atol=1e-9)
            assert float(noise.std()) == pytest.approx(part.noise_std, rel=0.1)
            seen.append(noise[:50])
    together = torch.cat(seen)
    assert len(torch.unique(together)) == len(together)


def test_the_noise_of_a_sum_alone_falls_in_the_order_of_its_memory(recorded: list[Recorded]) -> None:
    """It is divided where it is drawn, here by a number that float32 does not hold."""
    wide = wide_network()
    wide[0].weight = nn.Parameter(wide[0].weight.detach().t().contiguous().t())
    model, private = private_run(
        wide,
        sgd(wide, 0.0),
        data(dtype=torch.float64),
        sample_rate=0.21,
        noise_multiplier=1.3,
        clipping=PerExample(0.5, parts="tensor"),
    )
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    L = private._context.clipper.divisor
    assert float(torch.tensor(L, dtype=torch.float32)) != L
    batch = next(iter(private.loader))
    indices, key = private.loader.current.indices.tolist(), private._context.keys.key.copy()
    groups = {part.parameters: part.sensitivity for part in private.parts()}
    total = clipped_sum_by_hand(model, private._context.plan.dataset, indices, groups)
    step(*batch)
    for number, part in enumerate(private.parts()):
        (name,) = part.parameters
        noise = model.get_parameter(name).grad * L - total[name]
        noise = noise.t().flatten() if number == 0 else noise.flatten()
        words = key_words(key.derive(f"noise/{number}/0/0"))
        expected = normals(words, len(noise), part.noise_std, torch.float64)
        torch.testing.assert_close(noise, expected, rtol=1e-9, atol=1e-9)


def test_many_buckets_get_a_key_each(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.noise.gaussian.BUCKET", 30)
    # (So much noise saturates the network, and without gradients the probe finds no coupling.)
    model, private = private_run(noise_multiplier=1e6, probe_independence=False)
    step = private.compiled(loss_with(model))
    go(private, step, 7)
    noise = torch.cat([g.flatten() for g in gradients(model).values()])
    assert len(step._captured._keys) == 2  # 5 * 4 + 4 numbers, and 4 * 3 + 3
    assert len(torch.unique(noise)) == len(noise)


class Watched(MemoryLedger):
    """Says what the gradients and the key were when a release was charged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seen, self.refuses = model, [], False

    def charge(self, *arguments: Any) -> None:
        if self.refuses:
            raise OSError("disk full")
        super().charge(*arguments)
        self.seen.append(gradients(self.model))


@pytest.mark.parametrize("physical", [None, 3])
def test_each_step_is_charged_once_before_anything_is_visible(physical: int | None, recorded: list[Recorded]) -> None:
    model = network()
    ledger = Watched(model)
    _, private = private_run(model, ledger=ledger, max_physical_batch_size=physical)
    step = private.compiled(loss_with(model), 3)
    released: list[dict[str, Tensor]] = []
    while len(released) < 12:
        for batch in private.loader.pieces():
            if step(*batch):
                released.append(gradients(model))
    assert len(ledger.seen) == len(released) == private.steps
    assert recorded[1].replays > 5
    for at_charge, now in zip(ledger.seen, released, strict=True):
        assert not any(torch.equal(at_charge[name], now[name]) for name in at_charge)


def test_nothing_is_released_if_it_cannot_be_charged(recorded: list[Recorded]) -> None:
    model = network()
    ledger = Watched(model)
    _, private = private_run(model, ledger=ledger)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    key, weights = private._context.keys.key.secret_bytes(), parameters(model)
    ledger.refuses = True
    with pytest.raises(OSError, match="disk full"):
        go(private, step, 1)
    assert private._context.keys.key.secret_bytes() == key
    assert same(parameters(model), weights)
    assert not gradients(model)  # as in an ordinary step: the previous release is overwritten
    ledger.refuses = False
    go(private, step, 2)
    assert private.steps == 8


def test_a_batch_that_was_left_in_the_middle_is_not_counted_twice(recorded: list[Recorded]) -> None:
    options = {"sampling": "fixed-size", "max_physical_batch_size": 3}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    for _ in range(2):
        assert not step(*next(iter(private.loader.pieces())))
    go(private, step, 2)
    go(plain, ordinary(expected, plain), 8)
    require_close(model, expected)


def test_a_piece_that_failed_in_the_middle_cannot_be_gathered_twice(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sampling": "fixed-size", "max_physical_batch_size": 5}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    step = private.compiled(loss_with(model), 2)
    go(private, step, 6)
    pieces = iter(private.loader.pieces())
    assert not step(*next(pieces))
    second = next(pieces)
    with monkeypatch.context() as patched:  # of two pieces of 2 and 1 the second fails
        calls = Counter[str]()

        def failing(self: Any, rows: Any, count: int, fill: Any = captured.FixedRows.fill) -> None:
            calls["fill"] += 1
            if calls["fill"] == 2:
                raise MemoryError
            fill(self, rows, count)

        patched.setattr(captured.FixedRows, "fill", failing)
        with pytest.raises(MemoryError):
            step(*second)
    with pytest.raises(StepError, match="go through the same step"):
        step(*second)
    go(private, step, 2)
    go(plain, ordinary(expected, plain), 8)
    require_close(model, expected)


@pytest.mark.parametrize("begins_compiled", [True, False])
def test_one_batch_does_not_go_through_two_kinds_of_steps(begins_compiled: bool, recorded: list[Recorded]) -> None:
    """What one of them gathered of a batch is never released with the records of another batch."""
    options = {"sampling": "fixed-size", "max_physical_batch_size": 5}
    model, private = exact_run(**options)
    step, other = private.compiled(loss_with(model)), ordinary(model, private)
    go(private, step, 6)
    first, second = (step, other) if begins_compiled else (other, step)
    assert not first(*next(iter(private.loader.pieces())))  # left in the middle
    go(private, second, 1)
    pieces = iter(private.loader.pieces())
    assert not second(*next(pieces))
    left = private.loader.current.indices
    names = tuple(dict(model.named_parameters()))
    batch = next(pieces)
    if begins_compiled:
        with pytest.raises(StepError, match="go through the same step"):
            first(*batch)
    else:
        indices = private.loader.current.indices
        assert not set(indices.tolist()) & set(left.tolist())
        total = clipped_sum_by_hand(model, private._context.plan.dataset, indices.tolist(), {names: 0.7})
        assert first(*batch)
        for name, g in gradients(model).items():
            torch.testing.assert_close(g * 8, total[name], rtol=1e-9, atol=1e-11)


# The model and the optimizer may change


class Buffered(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*network(torch.float64))
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(
    "change",
    {
        "eval": lambda m: m.eval(),
        "eval of one layer": lambda m: m[0].eval(),
        "requires_grad": lambda m: m[0].bias.requires_grad_(False),
        "another place": lambda m: setattr(m[0].bias, "data", m[0].bias.data.clone()),
        "another parameter": lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach().clone())),
        "another buffer": lambda m: setattr(m, "factor", torch.ones((), dtype=torch.float64)),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_model_that_was_changed_is_refused(change: tuple[str, Any], recorded: list[Recorded]) -> None:
    model = Buffered()
    _, private = private_run(model, None, data(dtype=torch.float64), noise_multiplier=0)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    batch = next(iter(private.loader))
    keeps = list(model.parameters())  # otherwise a new one could have the address of the old one
    factor = model.factor
    change[1](model)
    steps = private.steps
    # A stand-in for a graph runs the model again, which may refuse the change before the step does.
    with pytest.raises((StepError, UnsupportedModelError), match=r"call private\.compiled again|take no part"):
        step(*batch)
    assert private.steps == steps
    assert keeps and factor is not None


def _accumulates(model: Buffered, batch: Any) -> None:
    losses_of(model, batch).sum().backward()  # type: ignore[no-untyped-call]


def _hooked(model: Buffered, batch: Any) -> None:
    model[0].bias.register_hook(lambda grad: grad)


def _learns(model: Buffered, batch: Any) -> None:
    model.factor += batch[0].mean()


def _moves(model: Buffered, batch: Any) -> None:
    with torch.no_grad():
        model[0].bias += batch[0].mean()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (_accumulates, "has a gradient that private"),
        (_hooked, "has a hook on its gradient"),
        (_learns, r"'factor'.* was set or changed between the draw"),
        (_moves, r"'0\.bias'.* was set or changed between the draw"),
    ],
)
def test_a_replay_makes_the_guards_of_an_ordinary_step(
    act: Callable[..., None], message: str, recorded: list[Recorded]
) -> None:
    model = Buffered()
    _, private = private_run(model, None, data(dtype=torch.float64), noise_multiplier=0)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    batch = next(iter(private.loader))
    act(model, batch)
    done, before = private.steps, replays(recorded)
    with pytest.raises((StepError, UnsupportedModelError, ConfigurationError), match=message):
        step(*batch)
    assert replays(recorded) > before  # or it was no replay
    assert private.steps == done


def test_an_update_by_other_code_is_detected_although_the_step_was_replayed(recorded: list[Recorded]) -> None:
    """Four pieces of one batch are enough to capture, so that the second release is already a replayed one."""
    model = network()
    _, private = private_run(model, sampling="full", max_physical_batch_size=10)
    step = private.compiled(loss_with(model))
    go(private, step, 2)
    assert replays(recorded)
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(StepError, match="Something else than this run changed it"):
        go(private, step, 1)


def test_after_a_change_of_mode_a_new_compiled_step_continues(recorded: list[Recorded]) -> None:
    (model, private), (expected, plain) = exact_run(), exact_run()
    go(private, private.compiled(loss_with(model)), 6)
    model.eval()
    go(private, private.compiled(loss_with(model)), 6)
    go(plain, ordinary(expected, plain), 12)
    require_close(model, expected)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "momentum": lambda m: sgd(m, 0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedules(name: str, scheduled: bool, recorded: list[Recorded]) -> None:
    runs = []
    for is_compiled in (True, False):
        model, private = exact_run(optimizer=OPTIMIZERS[name])
        step = private.compiled(loss_with(model)) if is_compiled else ordinary(model, private)
        schedule = torch.optim.lr_scheduler.StepLR(private.optimizer, 6, 0.5) if scheduled else None
        for _ in range(20):
            go(private, step, 1)
            if schedule is not None:
                schedule.step()
        runs.append(model)
    require_close(*runs)
    captured_updates = len(recorded) - 2
    # Those that keep numbers on the host are never captured. A rate that stays for a while is captured anew.
    assert captured_updates == (0 if "Adam" in name or "RMS" in name else 1 + scheduled)


def test_a_rate_that_follows_a_metric_is_named_by_the_statement(recorded: list[Recorded]) -> None:
    model, private = exact_run()
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer, patience=0)
    go(private, step, 1)
    for _ in range(2):
        plateau.step(1.0)
    assert not describe.about(private._context).followed_metric and replays(recorded) > 0
    with pytest.warns(PrivacyWarning, match=r"ReduceLROnPlateau.*public data"):
        go(private, step, 1)
    assert describe.about(private._context).followed_metric


def updates_of(optimizer: torch.optim.Optimizer, times: int, update: Any = None) -> Any:
    update = update or cuda_graphs.Update(optimizer, torch.device("cpu"))
    for _ in range(times):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        update.prepare()
        update.run()
    return update


@pytest.mark.parametrize("what", ["rate", "group", "state", "momentum", "nothing"])
def test_an_update_is_captured_again_when_what_it_took_for_granted_changes(what: str, recorded: list[Recorded]) -> None:
    model = network()
    optimizer = sgd(model, momentum=0.9)
    update = updates_of(optimizer, 8)
    (graph,) = recorded
    before = graph.replays
    assert before > 2
    if what == "rate":
        optimizer.param_groups[0]["lr"] = 0.1
    elif what == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    elif what == "state":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # new tensors, in other places
    elif what == "momentum":
        optimizer.state.clear()
    updates_of(optimizer, 1, update)
    assert graph.replays == before + (what == "nothing")
    updates_of(optimizer, 8, update)
    assert len(recorded) == (1 if what == "nothing" else 2)


def test_an_optimizer_with_hooks_steps_itself(recorded: list[Recorded]) -> None:
    model, private = exact_run()
    calls: list[int] = []
    private.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    go(private, private.compiled(loss_with(model)), 12)
    assert len(calls) == 12 and len(recorded) == 2


def test_an_update_that_cannot_be_captured_is_made_by_the_optimizer(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = cuda_graphs.capture

    def refuse(act: Callable[[], Any], device: torch.device, warm: bool = True) -> Any:
        if not warm:
            raise RuntimeError("it waits for the device")
        return capture(act, device, warm)

    monkeypatch.setattr(cuda_graphs, "capture", refuse)
    (model, private), (expected, plain) = exact_run(), exact_run()
    go(private, private.compiled(loss_with(model)), 12)
    go(plain, ordinary(expected, plain), 12)
    require_close(model, expected)


# Eager steps between replays, stop and resume


def steps_itself(private: Private, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    made, backward = Counter[str](), pipeline.backward

    def counted(context: StepContext, losses: Tensor | None, outputs: Tensor | None) -> bool:
        made["ordinary"] += context is private._context
        return backward(context, losses, outputs)

    monkeypatch.setattr(pipeline, "backward", counted)
    return made


@pytest.mark.parametrize("physical", [None, 5])
def test_now_and_then_an_ordinary_step_looks_again(
    physical: int | None, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_LOOK_AGAIN_AFTER", 6)
    options = {"sampling": "fixed-size", "max_physical_batch_size": physical, "optimizer": OPTIMIZERS["momentum"]}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    made = steps_itself(private, monkeypatch)
    go(private, private.compiled(loss_with(model)), 24)
    go(plain, ordinary(expected, plain), 24)
    require_close(model, expected)
    pieces = 1 if physical is None else 2
    looks = (24 - 4 // pieces) * pieces // (6 + pieces)  # 6 replays, then the pieces of one batch
    assert made["ordinary"] == 4 + looks * pieces


class Halving(torch.optim.SGD):
    """Changes gradients in place, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        super().step()


def test_an_optimizer_may_change_gradients_in_place(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LOOK_AGAIN_AFTER", 2)
    runs = []
    for is_compiled in (True, False):
        model, private = exact_run(optimizer=lambda m: Halving(m.parameters(), 0.5))
        go(private, private.compiled(loss_with(model)) if is_compiled else ordinary(model, private), 12)
        runs.append(model)
    require_close(*runs)


def test_what_looks_again_refuses_what_an_ordinary_step_refuses(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that begins to compare examples: a replay does not run its code again, the periodic eager step does."""
    monkeypatch.setattr(compiled, "_LOOK_AGAIN_AFTER", 2)
    model, private = exact_run(sampling="fixed-size", batch_size=8)
    mixes: list[bool] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = losses_of(model, (x, y))
        return found.sum() if mixes else found

    step = private.compiled(loss)
    go(private, step, 5)
    mixes.append(True)
    with pytest.raises(StepError, match="single number"):
        go(private, step, 9)


def test_a_run_that_stopped_continues_with_compiled_steps(recorded: list[Recorded], tmp_path: Path) -> None:
    options = {"optimizer": OPTIMIZERS["momentum"], "steps": 40, "epochs": None}

    def begin() -> tuple[nn.Module, Private, CompiledStep]:
        model, private = exact_run(ledger=tmp_path / "ledger", **options)
        return model, private, private.compiled(loss_with(model))

    model, private, step = begin()
    go(private, step, 8)
    weights, state = copy.deepcopy(model.state_dict()), private.state_dict()
    private.close()
    assert recorded[1].replays == 4
    model, private, step = begin()
    model.load_state_dict(weights)
    private.load_state_dict(state)
    go(private, step, 9)
    expected, plain = exact_run(**options)
    go(plain, ordinary(expected, plain), 17)
    require_close(model, expected)
    assert private.steps == 17


def test_a_captured_step_lasts_through_load_state_dict(recorded: list[Recorded]) -> None:
    """The optimizer's state has another address then, and the gathered sums belong to another run."""
    options = {"sampling": "full", "max_physical_batch_size": 9, "optimizer": OPTIMIZERS["momentum"]}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    step = private.compiled(loss_with(model))
    for m, p, act in ((model, private, step), (expected, plain, ordinary(expected, plain))):
        go(p, act, 8)
        state, weights = copy.deepcopy(p.state_dict()), copy.deepcopy(m.state_dict())
        go(p, act, 2)
        assert not act(*next(iter(p.loader.pieces())))
        m.load_state_dict(weights)
        with pytest.warns(UserWarning, match="fresh secret"):
            p.load_state_dict(state)
        go(p, act, 6)
    require_close(model, expected)


# ------------------------------------------------------------------ secrets


def test_the_keys_of_a_step_are_gone_when_they_have_served(recorded: list[Recorded]) -> None:
    model, private = exact_run(noise_multiplier=1.0)
    step = private.compiled(loss_with(model))
    go(private, step, 8)
    captured = step._captured
    assert captured is not None and not captured._keys.any()
    assert captured._host_keys[0].any() and not captured._host_keys[1].any()  # only the last step's are left


def test_a_release_that_fails_leaves_no_key_that_could_serve_another_sum(recorded: list[Recorded]) -> None:
    """`.grad` is the graph's own memory: it may have been written before the failure."""
    model, private = exact_run(noise_multiplier=1.0)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    _, release, *_ = recorded
    before, steps = private._context.keys.key.secret_bytes(), private.steps

    def fails() -> None:
        release._act()
        raise KeyboardInterrupt

    release.replay = fails  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step(*next(iter(private.loader)))
    assert private.steps == steps + 1 and private._context.keys.key.secret_bytes() != before


def test_a_loss_that_is_no_function_is_refused() -> None:
    _, private = exact_run()
    with pytest.raises(ConfigurationError, match="loss must be a function"):
        private.compiled(torch.zeros(3))  # type: ignore[arg-type]
