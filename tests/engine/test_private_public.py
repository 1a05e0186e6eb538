"""Public statistics in a private run: refreshed and corrected by the engine, named in the statement."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, PerExample, make_private
from clipwise.clipping.base import Strategy
from clipwise.contrib import Adaptive, ByNorm, Multipliers, PublicData
from clipwise.engine.private import Private
from clipwise.errors import PrivacyWarning
from clipwise.layers import PublicBatchNorm, PublicStatistics
from clipwise.layers.public_batchnorm import PUBLIC_KINDS
from tests.layers.normalized import images, labels, losses_of, public, sound
from tests.optimizers import ThroughData

SIZE = 24


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def run(
    kind: str, noise_multiplier: float = 0.0, optimizer: Optimizers = sgd, clipping: Strategy | None = None
) -> tuple[nn.Module, Private]:
    model, _ = sound(kind)
    private = make_private(
        model,
        optimizer(model),
        TensorDataset(images(SIZE), labels(SIZE)),
        clipping=clipping or PerExample(1e9),
        sampling="full",
        noise_multiplier=noise_multiplier,
    )
    return model, private


def test_the_gradient_goes_through_the_public_statistics() -> None:
    """Without noise and clipping it is that of a network that computes its statistics in the forward pass."""
    model, private = run("public-exact")
    x, y = next(iter(private.loader))
    private.backward(losses_of(model, x, y))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    h, rows = images(SIZE), public()
    for layer in model:  # the same network, with both kinds of rows side by side
        if hasattr(layer, "running_mean"):
            axes = [0, *range(2, rows.dim())]
            mean, var = rows.mean(axes), rows.var(axes, unbiased=False)
            shape = (1, -1, *[1] * (rows.dim() - 2))
            scale = (layer.weight * (var + layer.eps).rsqrt()).view(shape)
            h, rows = ((t - mean.view(shape)) * scale + layer.bias.view(shape) for t in (h, rows))
        else:
            h, rows = layer(h), layer(rows)
    loss = F.cross_entropy(h, labels(SIZE), reduction="sum") / SIZE
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for (name, gradient), truth in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", ["public", "self+public", "public-exact"])
def test_a_plain_loop_trains_and_the_model_can_be_evaluated_at_any_time(kind: str) -> None:
    model, private = run(kind, noise_multiplier=1.0)
    for _ in range(3):
        for x, y in private.loader:
            private.step(losses_of(model, x, y))
            with torch.no_grad():
                model.eval()(images(2, seed=5))
            model.train()
    assert private.steps == 3
    assert PublicStatistics.of(model).is_fresh


def test_the_statement_names_the_public_rows() -> None:
    _, private = run("public", noise_multiplier=1.0)
    said = str(private.statement())
    assert "12 rows, for the statistics of normalization layers" in said
    _, other = run("group", noise_multiplier=1.0)
    assert "public data  none recorded" in str(other.statement())


def test_another_kind_is_another_configuration() -> None:
    assert len({run(kind)[1].state_dict()["fingerprint"] for kind in ("public", "self+public", "group")}) >= 2


# ------------------------------------------------------------- as fresh as the weights


UNCOUNTED: list[Optimizers] = [
    lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True),
    lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=True),
    lambda m: ThroughData(m.parameters()),
]


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are not compared here, since that would wait for the device."""
    monkeypatch.setattr("clipwise.validation.inventory.Changes.may_have_changed", lambda self: self.was_counted())


def with_fresh_statistics(model: nn.Module, x: Tensor) -> Tensor:
    """By a copy that computes its statistics again."""
    other = copy.deepcopy(model)
    PublicStatistics.of(other).refresh()
    return other.eval()(x)


@pytest.mark.parametrize("is_whole_step", [True, False])
@pytest.mark.parametrize("optimizer", UNCOUNTED)
def test_statistics_follow_updates_that_torch_does_not_count(
    optimizer: Optimizers, is_whole_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_an_accelerator(monkeypatch)
    model, private = run("public", 1.0, optimizer)
    x, x_test = next(iter(private.loader)), images(3, seed=5)
    before = model(x_test)
    losses = losses_of(model, *x)
    if is_whole_step:
        private.step(losses)
    else:  # a loop that calls optimizer.step() itself may evaluate right after
        private.backward(losses)
        private.optimizer.step()
    after = model.eval()(x_test)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, with_fresh_statistics(model, x_test))


@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_one_public_pass_a_step(kind: str) -> None:
    model, private = run(kind, 1.0)
    passes = []
    collect = PublicStatistics.collect
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PublicStatistics, "collect", lambda *given: (passes.append(given[1]), collect(*given))[1])
        for _ in range(3):
            for batch in private.loader:
                private.step(losses_of(model, *batch))
    assert len(passes) == 3 * sum(isinstance(m, PublicBatchNorm) for m in model.modules())


def test_a_loaded_checkpoint_can_be_evaluated_at_once() -> None:
    model, private = run("public-exact", 1.0)
    private.step(losses_of(model, *next(iter(private.loader))))
    states = copy.deepcopy((model.state_dict(), private.state_dict()))
    private.close()
    other, again = run("public-exact", 1.0)
    other.load_state_dict(states[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        again.load_state_dict(states[1])
    torch.testing.assert_close(other.eval()(images(3)), model.eval()(images(3)))


@pytest.mark.slow
def test_the_optimizer_has_one_hook_that_is_removed_with_the_run() -> None:
    _, private = run("public", 1.0)
    optimizer = private.optimizer
    assert len(optimizer._optimizer_step_post_hooks) == 1
    copied = copy.deepcopy(optimizer)
    assert not copied._optimizer_step_post_hooks
    private.close()
    assert not optimizer._optimizer_step_post_hooks
    _, private = run("public", 1.0)
    optimizer = private.optimizer
    del private
    gc.collect()
    optimizer.step()  # the run was deleted without being closed


# ------------------------------------------------- strategies that read the model


def batches() -> PublicData:
    return PublicData(TensorDataset(public(), labels(12)), loss=losses_of, name="shared rows")


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "adaptive": lambda: PerExample(parts=Adaptive(batches(), every=1)),
    "multipliers": lambda: PerExample(parts=Multipliers(batches(), every=1)),
    "by norm": lambda: PerExample(parts=ByNorm(batches(), every=1)),
    "microbatches": lambda: Batch(parts=Adaptive(batches(), every=1, of="microbatch"), microbatches=2),
}


@pytest.mark.parametrize("kind", PUBLIC_KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_are_measured_with_public_statistics(strategy: str, kind: str) -> None:
    model, private = run(kind, 1.0, clipping=STRATEGIES[strategy]())
    before = private.parts()
    for _ in range(2):
        for batch in private.loader.pieces():
            private.step(losses_of(model, *batch))
    assert private.parts() != before
    assert PublicStatistics.of(model).is_fresh


@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_a_local_update_gets_a_copy_with_fresh_statistics(kind: str) -> None:
    def update(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        for _ in range(2):
            losses_of(model, *batch).mean().backward()
            sgd(model).step()
            PublicStatistics.of(model).refresh()

    model, private = run(kind, 1.0, clipping=Batch(local_update=update))
    before = model[0].weight.clone()
    for batch in private.loader:
        private.step_local_update(batch)
    assert not torch.equal(model[0].weight, before)
    model.eval()(images(2))


def test_a_model_that_was_moved_is_refreshed_before_it_is_measured() -> None:
    model, statistics = sound("public")
    model.register_buffer("places", torch.zeros(2))  # is copied while norms are measured
    model.to(torch.float32)
    assert not statistics.is_fresh
    rows = PublicData(TensorDataset(public(torch.float32), labels(12)), loss=losses_of)
    make_private(
        model, sgd(model), TensorDataset(images(SIZE, torch.float32), labels(SIZE)), batch_size=8,
        noise_multiplier=1.0, clipping=PerExample(parts=Adaptive(rows)),
    )  # fmt: skip
    assert statistics.is_fresh
