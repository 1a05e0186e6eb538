"""Noised running statistics in the whole engine: one unit moves them by at most the stated sensitivity,
and the layers' buffers follow from releases."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import Batch, NoisedStatistics, PerExample, Private, layers
from clipwise.clipping import noised_parts
from clipwise.clipping import noised_statistics as statistics
from clipwise.clipping.base import Clipper
from clipwise.contrib import RandomLayer
from clipwise.engine import step
from clipwise.errors import UnsupportedModelError
from clipwise.gradients import METHODS
from clipwise.layers import BatchStatisticsNorm, ReleasedStatisticsNorm
from tests.soundness.first_step import (
    DRAWS,
    OF_BATCH,
    ONE_BY_ONE,
    SCALES,
    C,
    D,
    N,
    Pair,
    Setting,
    Without,
    any_neighbours,
    coupled,
    turned,
)

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
R, Z = 0.4, 1.3
RULE = NoisedStatistics(R, momentum=0.5, share=0.3)
USERS = [i % 10 for i in range(N)]


class Turn(nn.Module):
    """An adversarial layer before a batch norm: all rows show the sign of the batch's mean.

    Two positions per example, at +a and -a with a^2 = 2 if the mean is positive, and a = 0 if not: mean 0 and variance
    2 or 0, so that u = 0 and w is 1 or -1, up to eps.
    """

    def forward(self, x: Tensor) -> Tensor:
        a = math.sqrt(2) * (x.mean() > 0)
        return torch.stack([x * 0 + a, x * 0 - a], 2)


class Adversarial(nn.Module):
    """Two batch norm layers and a gradient that one record reverses."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()
        self.first = BatchStatisticsNorm(D)
        self.second = BatchStatisticsNorm(D, affine=False)
        self.weight = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        self.requires_grad_(False)
        self.weight.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(self.turn(x[:, :D])).sum((1, 2)) + self.second(self.turn(x[:, D:])).sum((1, 2))
        return 0 * inner + (x[:, :D] * self.weight).sum(1)


def remember(clipper: Clipper) -> dict[str, Tensor]:
    """Record the clipper's releases times the divisor: all sums of a step, since there is no noise."""
    found: dict[str, Tensor] = {}
    learn = clipper.learn

    def remembering(means: Mapping[str, Tensor]) -> bool:
        found.update({name: mean.double().clone() * clipper.divisor for name, mean in means.items()})
        return learn(means)

    clipper.learn = remembering  # type: ignore[method-assign]
    return found


def sums(setting: Setting, rows: Tensor, model: nn.Module, missing: Any = None) -> tuple[dict[str, Tensor], Private]:
    """All sums of the first step, before noise and division."""
    private = setting.begin(rows, model)
    if missing is not None:
        private.loader._cut = Without(private.loader._cut, missing)
    found = remember(private._context.clipper)
    for (x,) in private.loader.pieces():
        if private.backward(model(x)):
            break
    return found, private


def moved(private: Private, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each part's movement over its stated sensitivity; and "jointly", each over its noise, times z."""
    clipper = private._context.clipper
    parts = noised_parts(
        clipper.bounds, private._context.parameters, Z, private._context.strategy.split, clipper.divisor
    )
    found, joint = {}, []
    for part in parts:
        names = part.parameters or (part.name,)
        length = math.hypot(*(float((one[n] - other[n]).norm()) for n in names))
        found[part.name] = length / part.sensitivity
        joint.append(Z * length / part.noise_std)
    return {**found, "jointly": math.hypot(*joint)}


def neighbours(setting: Setting, model: nn.Module, pair: Pair) -> dict[str, float]:
    """The first step of two neighbouring runs from the same buffers."""
    other = copy.deepcopy(model)
    mine, private = sums(setting, pair.spoiled, model)
    if setting.adjacency == "zero-out":
        theirs, _ = sums(setting, pair.spoiled, other, missing=pair.victim)
    else:
        theirs, _ = sums(setting, pair.rows, other)
    return moved(private, mine, theirs)


def settings_of(sampling: str, adjacency: str, unit: str) -> list[Setting]:
    if unit == "user":
        strategy = Batch(C, running_statistics=RULE)
        return [Setting(strategy, sampling, adjacency, USERS, batch_size=5)]
    return [
        Setting(Batch(C, k, running_statistics=RULE, split=split), sampling, adjacency)
        for k, split in ((1, "optimal"), (4, "equal"))
    ]


ALL = [s for draw in OF_BATCH for s in settings_of(*draw)]


@pytest.mark.parametrize("setting", ALL, ids=repr)
def test_a_planted_adversary_reaches_the_stated_bound(setting: Setting) -> None:
    """In every layer, in the gradient, and in all of them jointly: the bound is tight."""
    model = Adversarial().double()
    pair = turned(setting.unit_of(int(setting.largest_piece(Adversarial())[0])))
    shares = neighbours(setting, model, pair)
    private = setting.begin(pair.rows, model)
    halves = setting.users is not None and setting.adjacency == "zero-out"
    stated = [p.sensitivity for p in private.parts()]
    assert stated == pytest.approx([(1 if halves else 2) * bound for bound in (C, R, R)], rel=1e-12)
    assert len(shares) == 4
    for share in shares.values():
        assert 1 - 1e-4 < share <= 1 + 1e-9  # up to eps of the layers


@QUICK
@given(
    st.sampled_from(DRAWS),
    st.sampled_from([1, 2, 4, 5, 10, "user"]),
    st.sampled_from(["all", "layer", RandomLayer()]),
    st.integers(0, N - 1),
    st.sampled_from(SCALES),
    st.integers(0, 10**6),
)
def test_no_neighbour_exceeds_the_bound(
    draw: tuple[str, str], k: Any, parts: Any, record: int, scale: float, seed: int
) -> None:
    assume(k != "user" or draw in ONE_BY_ONE)
    setting, pair = any_neighbours(draw, k, record, scale, seed, parts=parts, running_statistics=RULE)
    shares = neighbours(setting, deep(seed), pair)
    jointly = shares.pop("jointly")
    assert all(share <= 1 for share in shares.values())  # exactly
    assert jointly <= 1 + 1e-9


def deep(seed: int) -> nn.Module:
    """Two consecutive layers that mix examples, one of them at the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Sequential(nn.BatchNorm1d(2 * D), nn.Linear(2 * D, 2 * D))
        return nn.Sequential(layers.without_running_statistics(head), coupled(seed))


@pytest.mark.parametrize("setting", [*ALL[:2], ALL[-1]], ids=repr)
def test_without_the_clip_it_is_caught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "clipped_sum", lambda vectors, bound: vectors.sum(0))
    pair = turned(setting.unit_of(int(setting.largest_piece(Adversarial())[0])))
    assert neighbours(setting, Adversarial().double(), pair)["statistics of first"] > 2


def test_after_a_coupled_layer_one_record_moves_a_mean_by_more_than_its_share() -> None:
    """Why the whole vector is clipped: sums over rows, each within [-1, 1], would be stated as 2 over L rows."""
    torch.manual_seed(0)
    L, layer = 256, BatchStatisticsNorm(1, affine=False)
    x = torch.randn(L, 1).double()
    spoiled = x.clone()
    spoiled[0] = 1e6  # all others are then at -1 / sqrt(L), on one side of 0
    means = [float(torch.tanh(200 * layer(rows)).mean()) for rows in (x, spoiled)]
    assert abs(means[0] - means[1]) > 100 * 2 / L


# Per-example clipping, with layers that normalize by earlier releases


class OwnRows(nn.Module):
    """As `Adversarial`, but each row shows its own sign, and the layers do not mix rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReleasedStatisticsNorm(D), ReleasedStatisticsNorm(D, affine=False)
        self.weight = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        self.requires_grad_(False)
        self.weight.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        a_B1 = math.sqrt(2) * (x[:, :D].mean(1, keepdim=True) > 0)
        turned = torch.stack([x[:, :D] * 0 + a_B1, x[:, :D] * 0 - a_B1], 2)
        inner = self.first(turned).sum((1, 2)) + self.second(turned).sum((1, 2))
        return 0 * inner + (x[:, :D] * self.weight).sum(1)


def by_row(sampling: str, adjacency: str, split: str = "optimal", **options: Any) -> Setting:
    strategy: Any = PerExample(C, split=split, running_statistics=RULE, **options)
    return Setting(strategy, sampling, adjacency)


@pytest.mark.parametrize("draw", ONE_BY_ONE)
@pytest.mark.parametrize("split", ["optimal", "equal"])
def test_a_row_reaches_the_stated_bound(draw: tuple[str, str], split: str) -> None:
    setting = by_row(*draw, split)
    pair = turned(setting.largest_piece(OwnRows())[:1])
    shares = neighbours(setting, OwnRows().double(), pair)
    stated = [p.sensitivity for p in setting.begin(pair.rows, OwnRows().double()).parts()]
    factor = 2 if setting.adjacency == "replace-one" else 1
    assert stated == pytest.approx([factor * bound for bound in (C, R, R)], rel=1e-12)
    assert len(shares) == 4
    for share in shares.values():
        assert 1 - 1e-4 < share <= 1 + 1e-9


@QUICK
@given(
    st.sampled_from(ONE_BY_ONE),
    st.sampled_from(["all", "layer", RandomLayer()]),
    st.sampled_from(METHODS),
    st.integers(0, N - 1),
    st.sampled_from(SCALES),
    st.integers(0, 10**6),
)
def test_no_row_exceeds_the_bound(
    draw: tuple[str, str], parts: Any, method: str, record: int, scale: float, seed: int
) -> None:
    if isinstance(parts, RandomLayer):
        # Parts are drawn by the index in the batch: without the last one all others keep theirs.
        record = N - 1
    random = torch.Generator().manual_seed(seed)
    setting = by_row(*draw, parts=parts, method=method)
    rows = torch.randn(N, 2 * D, generator=random, dtype=torch.float64)
    spoiled = rows.clone()
    spoiled[record] = torch.randn(2 * D, generator=random).double() * scale
    shares = neighbours(setting, apart(seed), Pair(rows, spoiled, np.array([record])))
    assert all(share <= 1 + 1e-5 for share in shares.values())


def apart(seed: int) -> nn.Module:
    """Two layers, one of them at the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.BatchNorm1d(2 * D), nn.Linear(2 * D, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    return nn.Sequential(layers.with_released_statistics(model), nn.Flatten(0)).double()


def test_statistics_of_the_batch_in_place_of_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped as a whole, and stated as a sum of rows: R instead of 2 R."""
    setting = by_row("full", "zero-out")
    rows = torch.ones(N, 2 * D).double()
    rows[1:] = -1.0
    rows[0] = 1e6
    victim = np.array([0])

    class WholeBatch(OwnRows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(0, keepdim=True).expand_as(x)) + (x[:, :D] * self.weight).sum(1)

    clipped = statistics.LayerStatistics.clipped
    monkeypatch.setattr(
        statistics.LayerStatistics, "clipped", lambda self, losses, by_row: clipped(self, losses, False)
    )
    assert neighbours(setting, WholeBatch().double(), Pair(rows, rows, victim))["statistics of first"] > 1.9


# The layers' buffers


@pytest.mark.parametrize("strategy", ["batch", "per example"])
def test_whatever_is_saved_follows_from_what_was_released(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour gets the releases of a run: weights and buffers are bitwise equal after each step, though the
    batches differ."""
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(N, 2 * D, generator=random).double()
    spoiled = rows.clone()
    spoiled[:20] = 1e3 * torch.randn(20, 2 * D, generator=random)
    is_batch = strategy == "batch"
    by_batch = Setting(Batch(C, 4, running_statistics=RULE), "poisson", "zero-out")
    setting = by_batch if is_batch else by_row("poisson", "zero-out")
    releases: list[dict[str, Tensor]] = []
    saved: list[list[dict[str, Tensor]]] = []
    own: list[dict[str, Tensor]] = []
    honest = step.noised
    for number, data in enumerate((rows, spoiled)):
        model, states = deep(1).double() if is_batch else apart(1), []
        private = noisy(setting, data, model)

        def release(context: Any, total: dict[str, Tensor], first: bool = number == 0) -> Any:
            found = honest(context, total)
            if first:
                releases.append({name: value.clone() for name, value in found.items()})
                return found
            own.append(found)
            return {name: value.clone() for name, value in releases[len(own) - 1].items()}

        monkeypatch.setattr(step, "noised", release)
        while private.steps < 6:
            for (x,) in private.loader.pieces():
                if private.step(model(x)):
                    states.append(copy.deepcopy(model.state_dict()))
        saved.append(states)
    assert not torch.equal(own[0]["statistics of 0.0"], releases[0]["statistics of 0.0"])
    for mine, theirs in zip(*saved, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(saved[0][0]["0.0.running_var"], saved[0][-1]["0.0.running_var"])


def noisy(setting: Setting, rows: Tensor, model: nn.Module) -> Private:
    """The same draws and the same noise for every data set."""
    private = setting.begin(rows, model)
    clipper = private._context.clipper
    private._context.parts = noised_parts(clipper.bounds, private._context.parameters, Z, "optimal", clipper.divisor)
    return private


def test_other_changes_of_the_statistics_are_refused() -> None:
    """Only releases may change the buffers between a batch and its step."""
    model = deep(0)
    setting = Setting(Batch(C, running_statistics=RULE), "poisson", "zero-out")
    private = setting.begin(torch.randn(N, 2 * D), model)
    for (x,) in private.loader:
        losses = model(x)
        model[0][0].running_mean.copy_(x.mean(0))
        with pytest.raises(UnsupportedModelError, match="running_mean' was set or changed between the draw"):
            private.step(losses)
        break
