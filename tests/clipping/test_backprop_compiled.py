"""A captured step of `Backprop` is an ordinary one. Graphs are replaced as in tests/engine/test_compiled.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Backprop, Private, kernels, layers
from clipwise.clipping import backprop
from clipwise.engine import captured, compiled
from clipwise.errors import StepError
from clipwise.layers.clipped import switch
from tests.engine.test_compiled import Drawn, Recorded, drawn, go, loss_with, ordinary, recorded, replays, require_close
from tests.runs import data, gradients, network, private_run, sgd
from tests.sites import site

__all__ = ["drawn", "recorded"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = [(mode, bound) for mode in ("clip", "normalize") for bound in ("upstream", "gradient")]
every_way = pytest.mark.parametrize(("mode", "bound"), WAYS)


def exact_run(
    mode: str = "clip", bound: str = "gradient", dataset: Any = None, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Private]:
    """In float64 and without noise, so that rounding and noise do not hide a difference."""
    model = network(torch.float64) if model is None else model
    model = layers.clip_inputs(model, input_norm=2.0, grad_norm=0.5, mode=mode, bound=bound)
    defaults = {"noise_multiplier": 0, "seed": 3, "clipping": Backprop(), "epochs": 9}
    return private_run(model, sgd(model), dataset or data(dtype=torch.float64), **(defaults | options))


def images(size: int = 24) -> TensorDataset:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(size, 1, 6, 6, generator=random, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=random))


def convolutional() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 2, padding="same"),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 3, 3, stride=2),
            nn.Flatten(),
            nn.Linear(12, 3),
        ).double()


@every_way
@pytest.mark.parametrize("size", [3, 13, None])
def test_a_captured_step_gives_the_ordinary_sum(
    mode: str, bound: str, size: int | None, recorded: list[Recorded]
) -> None:
    (model, private), (expected, plain) = exact_run(mode, bound), exact_run(mode, bound)
    go(private, private.compiled(loss_with(model), size), 9)
    go(plain, ordinary(expected, plain), 9)
    require_close(model, expected)
    gather, release, *_ = recorded
    assert release.replays > 1 and gather.replays >= release.replays


@every_way
def test_images_too(mode: str, bound: str, recorded: list[Recorded]) -> None:
    runs = [exact_run(mode, bound, images(), convolutional(), batch_size=6) for _ in range(2)]
    (model, private), (expected, plain) = runs
    go(private, private.compiled(loss_with(model), 9), 8)
    go(plain, ordinary(expected, plain), 8)
    require_close(model, expected)
    assert replays(recorded) > 0


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_by_passes_too(
    mode: str, bound: str, value: float, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU (linear_map.py), in float32, with rows that fill up and one that is not finite."""
    x, y = images().tensors
    x[3, 0, 2, 2] = value
    runs = []
    for dtype in (torch.float32, torch.float64):
        monkeypatch.setattr(kernels, "usable", lambda t, dtype=dtype: dtype == torch.float32)
        dataset = TensorDataset(x.to(dtype), y)
        model, private = exact_run(mode, bound, dataset, convolutional().to(dtype), sampling="full")
        is_captured = dtype == torch.float32
        go(private, private.compiled(loss_with(model), 10) if is_captured else ordinary(model, private), 7)
        runs.append([p.double() for p in model.parameters()])
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-4)
    assert replays(recorded) > 0


def test_other_constants_are_captured_anew(recorded: list[Recorded]) -> None:
    (model, private), (expected, plain) = exact_run(), exact_run()
    step, plain_step = private.compiled(loss_with(model)), ordinary(expected, plain)
    for updates in (9, 9):
        go(private, step, updates)
        go(plain, plain_step, updates)
        for changed in (model, expected):
            layers.set_clips(changed, input_norm=0.3, grad_norm=0.05)
    require_close(model, expected)
    assert len(recorded) == 6 and all(graph.replays > 0 for graph in recorded)


def test_other_constants_with_the_same_noise_are_captured_anew(recorded: list[Recorded]) -> None:
    """C1 C2 stays, and there is no bias: the noise is the same."""

    def without_bias() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()

    (model, private), (expected, plain) = (exact_run(model=without_bias()) for _ in range(2))
    step, plain_step = private.compiled(loss_with(model)), ordinary(expected, plain)
    for updates in (9, 9):
        go(private, step, updates)
        go(plain, plain_step, updates)
        for changed in (model, expected):
            layers.set_clips(changed, input_norm=0.2, grad_norm=5.0)
    require_close(model, expected)
    assert len(recorded) == 6


def test_pieces_of_a_batch_have_the_constants_of_the_graph(recorded: list[Recorded]) -> None:
    model, private = exact_run(sampling="full", max_physical_batch_size=9)
    step = private.compiled(loss_with(model))
    go(private, step, 6)
    pieces = iter(private.loader.pieces())
    assert replays(recorded) > 0 and not step(*next(pieces))
    layers.set_clips(model, grad_norm=0.001)
    with pytest.raises(StepError, match="between two pieces of a batch"):
        step(*next(pieces))
    assert private.steps == 6
    go(private, step, 1)


def test_empty_and_single_draws_go_through_the_graphs(recorded: list[Recorded], drawn: Drawn) -> None:
    sizes = (4, 4, 4, 4, 4, 0, 1, 13, 0, 30)
    runs = []
    for is_compiled in (True, False):
        model, private = exact_run("normalize")
        drawn.set(*sizes)
        step = private.compiled(loss_with(model), 6) if is_compiled else ordinary(model, private)
        go(private, step, len(sizes))
        runs.append(model)
    require_close(*runs)
    gather, release, *_ = recorded
    assert gather.replays == 1 + 0 + 1 + 3 + 0 + 5
    assert release.replays == 6


@every_way
def test_rows_that_fill_up_add_nothing(mode: str, bound: str) -> None:
    """Bit for bit, and whatever they hold: also where their own derivative has no end."""
    model, _ = exact_run(mode, bound)
    clipper = Backprop().attach(site(model))
    x, y = (t[:6] for t in data(dtype=torch.float64).tensors)
    real_B = torch.tensor([True, True, True, False, True, False])

    def losses() -> Tensor:
        found = loss_with(model)(x, y)
        return found + ((found - found.detach()).abs() + real_B).sqrt()  # a root of 0 has an infinite slope

    found = clipper.clipped_sum(losses(), real_B)
    expected = clipper.clipped_sum(loss_with(model)(x[real_B], y[real_B]))
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-12, atol=1e-14)
        assert bool(total.any())
    of_padding = clipper.clipped_sum(loss_with(model)(x, y), torch.zeros_like(real_B))
    assert not any(bool(t.any()) for t in of_padding.values())


def with_record(i: int, value: float) -> TensorDataset:
    x, y = data(dtype=torch.float64).tensors
    x = x.clone()
    x[i] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize("physical", [None, 9])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_not_finite_is_gathered_by_an_ordinary_step(
    value: float, physical: int | None, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    gather_again = captured.Captured._gather_again
    monkeypatch.setattr(captured.Captured, "_gather_again", lambda *a: again.append(a[2]) or gather_again(*a))
    options = {"sampling": "full", "max_physical_batch_size": physical, "dataset": with_record(17, value)}
    (model, private), (expected, plain) = exact_run(**options), exact_run(**options)
    go(private, private.compiled(loss_with(model), 7), 9)
    go(plain, ordinary(expected, plain), 9)
    require_close(model, expected)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    _, release, *_ = recorded
    assert len(again) == release.replays > 0  # each step once, and only the piece that it is in


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_is_not_finite_is_noted_and_not_cleared(where: str) -> None:
    model, _ = exact_run()
    clipper = Backprop().attach(site(model))
    x, y = (t[:5].clone() for t in data(dtype=torch.float64).tensors)
    for is_bad in (False, True):
        if is_bad and where == "input":
            x[2, 0] = math.inf
        with clipper.putting_aside() as aside:
            losses = loss_with(model)(x, y)
            if is_bad and where == "gradient":
                losses = losses * torch.tensor([1.0, 1.0, math.inf, 1.0, 1.0])
            sums = clipper.clipped_sum(losses, torch.ones(5, dtype=torch.bool))
        happened = aside.happened()
        assert happened is not None and bool(happened) == is_bad
        assert all(bool(torch.isfinite(t).all()) for t in sums.values()) != is_bad
    assert not switch.noted(torch.zeros(1))  # only in that block


def test_a_step_that_looks_again_probes(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LOOK_AGAIN_AFTER", 3)
    probed: list[int] = []
    probe = backprop.require_rows_of_examples
    monkeypatch.setattr(backprop, "require_rows_of_examples", lambda *a: probed.append(len(a[0])) or probe(*a))
    model, private = exact_run(sampling="fixed-size")
    step = private.compiled(loss_with(model))
    go(private, step, 4 + 3)
    first = len(probed)
    assert replays(recorded) > 0 and first >= 2
    go(private, step, 1 + 3 + 1)
    assert len(probed) == first + 2


def test_every_wiring_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []
    monkeypatch.setattr(backprop, "require_rows_of_examples", lambda *a: probed.append(len(a[0])))
    model, _ = exact_run()
    clipper = Backprop().attach(site(model))
    x, y = (t[:5] for t in data(dtype=torch.float64).tensors)
    losses: Callable[[], Tensor] = lambda: loss_with(model)(x, y)  # noqa: E731
    for _ in range(4):
        clipper.clipped_sum(losses())
    assert len(probed) == 2
    for _ in range(4):
        clipper.clipped_sum(losses().tanh())
    assert len(probed) == 4


def test_noise_of_a_captured_step_is_that_of_its_parts(recorded: list[Recorded]) -> None:
    model, private = exact_run(noise_multiplier=1e4, batch_size=20)
    go(private, private.compiled(loss_with(model)), 8)
    assert replays(recorded) > 0
    values = gradients(model)
    scaled = [(values[part.parameters[0]] * 20 / part.noise_std).flatten() for part in private.parts()]
    assert all(0.1 < float(part.square().mean().sqrt()) < 2.5 for part in scaled)  # the smallest has 3 numbers
    assert 0.7 < float(torch.cat(scaled).square().mean().sqrt()) < 1.4
