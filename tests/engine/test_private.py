"""A private step is (sum of clipped per-example gradients + noise) / L, charged before it is seen."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import clipwise
from clipwise import PerExample, Private, accounting
from clipwise.errors import BudgetExhausted, CheckpointError, LedgerError, StepError
from clipwise.gradients import METHODS
from clipwise.ledger import crash_points, ledger
from clipwise.ledger.ledger import MemoryLedger
from clipwise.noise import mechanism
from clipwise.privacy import Adjacency, Entry, Part, Sampling, effective_multiplier
from clipwise.sampling.schemes import Poisson
from tests.runs import (
    LAYERS,
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
    train,
)

ALL = tuple(name for names in LAYERS.values() for name in names)

pytestmark = pytest.mark.usefixtures("one_thread")


def first_step(model: nn.Module, private: Private, backward_only: bool = False) -> list[int]:
    """Take one step and return the records of the batch."""
    batch = next(iter(private.loader))
    indices = private.loader.current.indices.tolist()  # type: ignore[union-attr]
    (private.backward if backward_only else private.step)(losses_of(model, batch))
    return indices


# What a step computes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_without_noise_is_the_clipped_sum_over_a_constant(scheme: str, method: str) -> None:
    model = network(torch.float64)
    dataset = data(dtype=torch.float64)
    _, private = private_run(
        model, sgd(model), dataset, noise_multiplier=0, clipping=PerExample(0.7, method=method), **SCHEMES[scheme]
    )
    expected_size = {"shuffled": SIZE / 6, "full": SIZE}.get(scheme, 8)
    for batch in private.loader:
        indices = private.loader.current.indices.tolist()  # type: ignore[union-attr]
        total = clipped_sum_by_hand(model, dataset, indices, {ALL: 0.7})
        before = parameters(model)
        private.step(losses_of(model, batch))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, total[name] / expected_size, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(p.detach(), before[name] - 0.5 * p.grad, rtol=1e-12, atol=0)


def test_clipping_per_layer_bounds_each_layer() -> None:
    model, dataset = network(torch.float64), data(dtype=torch.float64)
    _, private = private_run(model, None, dataset, noise_multiplier=0, clipping=PerExample(0.7, parts="layer"))
    indices = first_step(model, private, backward_only=True)
    norms = {tuple(names): 0.7 / math.sqrt(2) for names in LAYERS.values()}
    total = clipped_sum_by_hand(model, dataset, indices, norms)
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, total[name] / 8, rtol=1e-8, atol=1e-10)


def wide_network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 3))


def noise_of_a_step(model: nn.Module, private: Private, norms: dict[tuple[str, ...], float]) -> dict[str, Tensor]:
    """grad * L - clipped sum, for one step."""
    indices = first_step(model, private, backward_only=True)
    total = clipped_sum_by_hand(model, private._context.plan.dataset, indices, norms)
    return {
        name: g.double() * private._context.scheme.expected_size - total[name] for name, g in gradients(model).items()
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_noise_has_the_stated_size(scheme: str) -> None:
    model, private = private_run(
        wide_network(), noise_multiplier=1.3, clipping=PerExample(0.5), seed=5, **SCHEMES[scheme]
    )
    doubled = scheme == "fixed-size"  # replacing a record moves a sum by 2C
    (part,) = private.parts()
    assert part.sensitivity == (1.0 if doubled else 0.5)
    assert part.noise_std == pytest.approx(1.3 * part.sensitivity)
    noise = torch.cat([n.flatten() for n in noise_of_a_step(model, private, {ALL: 0.5}).values()])
    assert float(noise.std()) == pytest.approx(part.noise_std, rel=0.05)
    assert abs(float(noise.mean())) < 4 * part.noise_std / math.sqrt(len(noise))


@pytest.mark.parametrize("split", ["equal", "optimal"])
def test_noise_of_several_parts_has_the_requested_multiplier_together(split: str) -> None:
    clipping = PerExample(0.5, parts="layer", split=split)
    model, private = private_run(wide_network(), noise_multiplier=1.3, clipping=clipping, seed=5)
    parts = private.parts()
    assert [p.name for p in parts] == ["0", "2"]
    assert effective_multiplier(parts) == pytest.approx(1.3)
    assert private.noise_multiplier <= 1.3 == pytest.approx(private.noise_multiplier)
    norms = {tuple(names): 0.5 / math.sqrt(2) for names in LAYERS.values()}
    noise = noise_of_a_step(model, private, norms)
    drawn = []
    for part in parts:
        std = float(torch.cat([noise[n].flatten() for n in part.parameters]).std())
        assert std == pytest.approx(part.noise_std, rel=0.08)
        drawn.append(Part(part.name, part.parameters, part.sensitivity, std))
    assert effective_multiplier(drawn) == pytest.approx(1.3, rel=0.08)
    assert (drawn[0].noise_std == pytest.approx(drawn[1].noise_std, rel=0.08)) == (split == "equal")
    first, second = (torch.cat([noise[n].flatten() for n in part.parameters])[:1000] for part in parts)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.15  # a stream for each


class Drawn:
    """Lets a test say which records every Poisson batch holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 0
        monkeypatch.setattr(Poisson, "draw", self.draw)

    def draw(self, *secrets: Any) -> Any:
        return np.arange(self.size, dtype=np.int64)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)


@pytest.mark.parametrize("size", [1, 3, 20])
def test_the_divisor_does_not_follow_the_size_drawn(drawn: Drawn, size: int) -> None:
    drawn.size = size
    model, dataset = network(torch.float64), data(dtype=torch.float64)
    _, private = private_run(model, None, dataset, noise_multiplier=0)
    first_step(model, private)
    total = clipped_sum_by_hand(network(torch.float64), dataset, range(size), {ALL: 1.0})
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, total[name] / 8, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_empty_batch_releases_noise_and_counts(drawn: Drawn, dtype: torch.dtype) -> None:
    model = network(dtype)
    _, private = private_run(model, None, data(dtype=dtype), noise_multiplier=2.0, seed=1)
    first_step(model, private)
    assert private._context.ledger.position == 1
    noise = torch.cat([g.flatten().double() for g in gradients(model).values()])
    assert 0.7 < float(noise.std()) / (2.0 / 8) < 1.4
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_without_noise_an_empty_batch_releases_zeros(drawn: Drawn) -> None:
    model, private = private_run(noise_multiplier=0)
    first_step(model, private)
    assert all(not g.any() for g in gradients(model).values()) and private._context.ledger.position == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_get_finite_gradients_of_their_type(dtype: torch.dtype) -> None:
    model = network(dtype)
    _, private = private_run(model, None, data(dtype=dtype), seed=1)
    train(model, private, 5)
    for p in model.parameters():
        assert p.grad is not None and p.grad.dtype == dtype and bool(torch.isfinite(p.grad).all())


def test_a_record_that_is_not_finite_moves_nothing() -> None:
    clean, dirty = data(dtype=torch.float64), data(dtype=torch.float64)
    dirty.tensors[0][3] = torch.nan
    model = network(torch.float64)
    _, private = private_run(model, None, dirty, noise_multiplier=0, sampling="full")
    first_step(model, private, backward_only=True)
    total = clipped_sum_by_hand(model, clean, [i for i in range(SIZE) if i != 3], {ALL: 1.0})
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, total[name] / SIZE, rtol=1e-8, atol=1e-10)


class SharedBiases(nn.Module):
    """Two biases and two weights with equal gradients: sums that are one tensor would be added twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.first + self.second) * self.scale


@pytest.mark.parametrize("make", [network, SharedBiases])
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_the_physical_batch_size_changes_no_result(make: Any, noise: float, sampling: str) -> None:
    results = []
    for size in (None, 1, 2, 3, 5, 1000):
        model, private = private_run(
            make(), noise_multiplier=noise, seed=4, max_physical_batch_size=size, sampling=sampling
        )
        assert len(private.loader) == 5
        train(model, private, 6)
        assert private._context.ledger.position == 6
        results.append(parameters(model))
    for other in results[1:]:
        for name, p in results[0].items():
            torch.testing.assert_close(other[name], p, rtol=2e-5, atol=2e-6)


def test_a_batch_that_was_left_in_the_middle_is_not_counted_twice() -> None:
    model, private = private_run(noise_multiplier=0, sampling="full", max_physical_batch_size=15)
    batch = next(iter(private.loader.pieces()))
    assert private.step(losses_of(model, batch)) is False  # one piece of three, then the loop is left
    assert private._context.ledger.position == 0 and not gradients(model)
    train(model, private, 1)
    total = clipped_sum_by_hand(network(), data(), range(SIZE), {ALL: 1.0})
    for name, g in gradients(model).items():
        torch.testing.assert_close(g.double(), total[name] / SIZE, rtol=1e-4, atol=1e-6)


# The model and the training loop stay as they are


def marks(model: nn.Module) -> list[Any]:
    """All hooks and attributes that could be left on a model."""
    found: list[Any] = [list(model.state_dict())]
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")}
        found.append((name, type(module), sorted(vars(module)), sorted(hooks.items())))
    for name, p in model.named_parameters():
        found.append((name, type(p), vars(p), p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)))
    return found


def test_nothing_is_left_on_the_model_or_the_optimizer() -> None:
    model = network()
    optimizer = sgd(model)
    before, keys, kind = marks(model), sorted(vars(optimizer)), type(optimizer)
    _, private = private_run(model, optimizer)
    assert private.optimizer is optimizer
    train(model, private, 3)
    assert marks(model) == before
    assert (sorted(vars(optimizer)), type(optimizer)) == (keys, kind)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_backward_and_update_can_be_called_separately(kind: Any) -> None:
    results = []
    for together in (True, False):
        model = network()
        _, private = private_run(model, kind(model.parameters(), lr=0.1), seed=2)
        for batch in private.loader:
            losses = losses_of(model, batch)
            if together:
                assert private.step(losses) is True
            else:
                before = parameters(model)
                assert private.backward(losses) is True
                assert same(before, parameters(model))
                private.optimizer.step()
        results.append(parameters(model))
    assert same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_schedulers_and_further_clipping_work_as_without_privacy(set_to_none: bool) -> None:
    model = network()
    _, private = private_run(model, sgd(model, lr=0.5), seed=2)
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=2, gamma=0.1)
    for batch in private.loader:
        private.optimizer.zero_grad(set_to_none=set_to_none)
        private.backward(losses_of(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = parameters(model)
        private.optimizer.step()
        moved = torch.cat([(p - before[n]).flatten() for n, p in parameters(model).items()])
        assert float(moved.norm()) <= 1.01e-3 * scheduler.get_last_lr()[0]
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.5 * 0.1**2)


def test_the_length_of_the_loader_is_the_number_of_steps_of_an_epoch() -> None:
    for options, steps in [
        ({"batch_size": 8}, 5),
        ({"batch_size": 7}, 6),
        ({"sample_rate": 0.3}, 4),
        ({"sampling": "shuffled", "batch_size": 7}, 6),
        ({"sampling": "full"}, 1),
    ]:
        model, private = private_run(**options)
        assert len(private.loader) == steps
        assert sum(private.step(losses_of(model, batch)) for batch in private.loader) == steps


def test_looking_at_a_batch_costs_nothing() -> None:
    model, private = private_run(seed=3)
    looked = [next(iter(private.loader))[0] for _ in range(3)]
    assert private._context.ledger.position == 0
    batch = next(iter(private.loader))
    assert all(torch.equal(batch[0], x) for x in looked)
    private.step(losses_of(model, batch))
    assert private._context.ledger.position == 1
    assert not torch.equal(next(iter(private.loader))[0], looked[0])


class Pairs(Dataset[Any]):
    broken = False

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.broken:
            raise OSError("the disk is gone")
        x, y = data()[index]
        return {"x": x, "y": int(y)}


def test_a_data_set_of_records_gives_the_run_of_the_same_tensors() -> None:
    model, private = private_run(dataset=Pairs(), noise_multiplier=0, sampling="full")
    for batch in private.loader:
        private.step(losses_of(model, (batch["x"], batch["y"])))
    other, private = private_run(noise_multiplier=0, sampling="full")
    train(other, private, 1)
    assert same(parameters(model), parameters(other))


def test_workers_fetch_the_same_run(tmp_path: Path) -> None:
    results = []
    for workers in (0, 2):
        model, private = private_run(num_workers=workers, seed=1, ledger=tmp_path / f"{workers}.ledger")
        train(model, private, 7)
        private.close()
        results.append(parameters(model))
        assert ledger.read(tmp_path / f"{workers}.ledger").position == 7
    assert same(*results)


# Closing


def test_close_ends_the_run(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "run.ledger")
    iterator = iter(private.loader)
    batch = next(iterator)
    with private as entered:
        assert entered is private
        private.step(losses_of(model, batch))
    private.close()  # a second time does nothing
    before = parameters(model)
    with pytest.raises(StepError, match="closed"):
        private.step(losses_of(model, batch))
    with pytest.raises(StepError, match="closed"):
        next(iter(private.loader))
    with pytest.raises(StepError):
        next(iterator)
    with pytest.raises(StepError, match="closed"):
        private.load_state_dict(private.state_dict())
    assert same(before, parameters(model))
    assert ledger.read(tmp_path / "run.ledger").position == 1 and ledger.read(tmp_path / "run.ledger").clean
    assert not any(private._context.keys.key._secret)


def test_an_error_inside_with_still_settles_the_ledger(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "run.ledger")
    with pytest.raises(KeyError), private:
        train(model, private, 3)
        raise KeyError
    assert ledger.read(tmp_path / "run.ledger").position == 3


@pytest.mark.parametrize("broken", ["resume file", "data"])
def test_the_ledger_is_settled_even_if_the_secrets_cannot_be_kept(broken: str, tmp_path: Path) -> None:
    dataset = Pairs()
    resume_file = tmp_path / "folder" / "secrets" if broken == "resume file" else None
    model, private = private_run(dataset=dataset, ledger=tmp_path / "run.ledger", resume_file=resume_file)
    for batch in private.loader:
        private.step(losses_of(model, (batch["x"], batch["y"])))
    if broken == "data":
        dataset.broken = True
    else:
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").touch()
    with pytest.raises(OSError if broken == "data" else CheckpointError):
        private.close()
    assert ledger.read(tmp_path / "run.ledger").clean and ledger.read(tmp_path / "run.ledger").position == 5
    assert not any(private._context.keys.key._secret)


# Seeds


def noise_of_first_step(seed: int | None = 7, **options: Any) -> Tensor:
    model, private = private_run(sampling="full", seed=seed, **options)
    norms = {p.parameters: p.sensitivity for p in private.parts()}
    return torch.cat([n.flatten() for n in noise_of_a_step(model, private, norms).values()])


def test_the_same_seed_gives_the_same_run_bit_for_bit() -> None:
    results = []
    for _ in range(2):
        model = network()
        _, private = private_run(model, torch.optim.AdamW(model.parameters()), seed=11, max_physical_batch_size=3)
        train(model, private, 7)
        results.append(parameters(model))
    assert same(*results)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(7, 8), (None, None)])
def test_another_seed_or_none_gives_other_noise(seeds: tuple[int | None, int | None]) -> None:
    a, b = map(noise_of_first_step, seeds)
    # Equal noise has 1; 39 independent values have 0.75 once in ten million times.
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.75


def test_noise_of_equal_runs_is_equal() -> None:
    """So that the test above can fail."""
    a, b = noise_of_first_step(), noise_of_first_step()
    assert torch.allclose(a, b, atol=1e-5) and float(a.std()) > 0.5


def test_noise_and_batches_differ_from_step_to_step() -> None:
    model, private = private_run(seed=1, noise_multiplier=1.0)
    seen, noises = [], []
    for batch in private.loader:
        indices = private.loader.current.indices.tolist()  # type: ignore[union-attr]
        total = clipped_sum_by_hand(model, data(), indices, {ALL: 1.0})
        private.step(losses_of(model, batch))
        noises.append(torch.cat([(g.double() * 8 - total[n]).flatten() for n, g in gradients(model).items()]))
        seen.append(tuple(indices))
    assert len(set(seen)) == 5
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(5)
    assert float(correlations.abs().max()) < 0.6


# Charged before it is seen


def test_a_release_is_charged_then_noised_then_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run(clipping=PerExample(1.0, parts="layer"))
    order: list[str] = []

    def shown() -> str:
        return "shown" if gradients(model) else "hidden"

    def charge(*charged: Any) -> None:
        order.append(f"charge {shown()}")
        original(*charged)

    def noise(*args: Any, **options: Any) -> None:
        order.append(f"noise {shown()} {private._context.ledger.position}")
        add_noise(*args, **options)

    original, add_noise = private._context.ledger.charge, mechanism.add_gaussian
    monkeypatch.setattr(private._context.ledger, "charge", charge)
    monkeypatch.setattr(mechanism, "add_gaussian", noise)
    monkeypatch.setattr(crash_points, "reached", lambda point: order.append(f"{point} {shown()}"))
    first_step(model, private)
    assert order == ["charge hidden", "noise hidden 1", "step.before-grad hidden", "step.before-update shown"]


def test_nothing_is_released_if_it_cannot_be_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = private_run()

    def charge(*charged: Any) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(private._context.ledger, "charge", charge)
    before = parameters(model)
    with pytest.raises(LedgerError):
        first_step(model, private)
    assert same(before, parameters(model)) and not gradients(model)


@pytest.mark.parametrize("point", ["noise", "grad"])
def test_a_release_that_fails_in_the_middle_is_charged_and_not_mixed_up(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the third step, caught by the loop: every record's passes must stay counted."""
    model, private = private_run(sampling="shuffled", batch_size=8, seed=1)
    taken: Counter[int] = Counter()
    worst = 0

    def epoch() -> None:
        nonlocal worst
        for batch in private.loader:
            indices = private.loader.current.indices.tolist()  # type: ignore[union-attr]
            try:
                private.step(losses_of(model, batch))
            except MemoryError:
                continue
            taken.update(indices)
            passes = sum(-(-entry.count // entry.event.period) for entry in private._context.ledger.history())
            worst = max(worst, max(taken.values()) - passes)

    def fails(*args: Any, **options: Any) -> Any:
        if private._context.ledger.position == 3 and not failed:
            failed.append(True)
            raise MemoryError
        return real(*args, **options)

    failed: list[bool] = []
    real: Any = mechanism.add_gaussian if point == "noise" else crash_points.reached
    monkeypatch.setattr(*((mechanism, "add_gaussian") if point == "noise" else (crash_points, "reached")), fails)
    with pytest.raises(StepError, match="iterator"):
        epoch()
    assert failed
    for _ in range(4):
        epoch()
    assert worst <= 0


def test_two_runs_in_one_ledger_are_not_merged() -> None:
    """A shuffled pass that another key began is not finished by this one."""
    open_ledger = MemoryLedger()
    first, private = private_run(sampling="shuffled", ledger=open_ledger)
    train(first, private, 2)
    second, private = private_run(sampling="shuffled", ledger=open_ledger)
    train(second, private, 8)
    event = private.state_dict()["history"][0]["event"]
    assert open_ledger.history() == [
        Entry(clipwise.Event.from_dict(event), 2),
        Entry(clipwise.Event.from_dict(event), 8),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_release_is_counted(scheme: str) -> None:
    model, private = private_run(seed=1, **SCHEMES[scheme])
    for n in range(1, 8):
        train(model, private, 1)
        assert private._context.ledger.position == n == private.state_dict()["position"]
    (entry,) = private._context.ledger.history()
    assert (entry.event.sampling, entry.count) == (Sampling(scheme), 7)
    assert entry.event.noise_multiplier == private.noise_multiplier


def test_spent_is_the_figure_of_the_accountant() -> None:
    model, private = private_run(delta=1e-5)
    assert private.spent().epsilon == 0
    train(model, private, 3)
    spent = private.spent()
    expected = accounting.epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=3, delta=1e-5)
    assert spent.epsilon == pytest.approx(expected)
    assert (spent.delta, spent.steps, spent.adjacency) == (1e-5, 3, Adjacency.ZERO_OUT)
    assert private.spent(delta=1e-3).epsilon < spent.epsilon
    assert private.spent(accountant="rdp").epsilon >= spent.epsilon
    train(model, private, 1)
    assert private.spent().epsilon > spent.epsilon


def test_without_noise_epsilon_is_infinite() -> None:
    model, private = private_run(noise_multiplier=0)
    train(model, private, 1)
    assert private.spent().epsilon == math.inf
    assert "inf" in str(private.statement())


# The size drawn is secret


def test_the_size_drawn_appears_nowhere(drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is written or shown is the same, whatever was drawn."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)  # the id of the run
    written = []
    for size in (0, 1, 17, 31):
        drawn.size = size
        path = tmp_path / f"{size}.ledger"
        model, private = private_run(ledger=path, max_physical_batch_size=10, seed=1)
        shown = []
        for batch in private.loader.pieces():
            shown.append(repr(private.loader))
            losses = losses_of(model, batch)
            for wrong in (losses.sum(), losses[:, None], torch.cat([losses, losses.new_zeros(1)]), losses.detach()):
                with pytest.raises(StepError) as error:
                    private.step(wrong)
                shown.append(str(error.value))
            if private.step(losses):
                shown.append(str(private.statement()) + repr(private.statement().to_dict()))
                break
        state = {**private.state_dict(), "optimizer": None, "weights": None}  # these follow from what was released
        private.close()
        with pytest.raises(StepError) as error:
            private.step(losses)
        shown += [repr(state), str(error.value), path.read_bytes().decode()]
        written.append(sorted(set(shown)))
    assert all(other == written[0] for other in written)
    assert "31" not in repr(private.loader.current)


def test_an_interrupt_right_after_a_charge_makes_the_budget_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the ledger is never still in the budget as well."""
    model, private = private_run(sampling="fixed-size", epsilon=1.0, delta=1e-3, steps=3)
    charge = private._context.ledger.charge

    def interrupted(*charged: Any) -> None:
        charge(*charged)
        raise KeyboardInterrupt

    monkeypatch.setattr(private._context.ledger, "charge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, private, 1)
    monkeypatch.setattr(private._context.ledger, "charge", charge)
    with pytest.raises(BudgetExhausted):
        train(model, private, 4)
    assert private.steps <= 3 and private.spent().epsilon <= 1.0
