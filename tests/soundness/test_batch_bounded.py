"""Batch clipping in the whole engine: one unit moves the sum by at most the stated sensitivity, and reaches it.

Two neighbouring data sets are trained on for one step without noise, from the same weights and with the same draw.
An empty record is drawn, and removed before anything is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, Private, make_private
from clipwise.clipping.base import Site
from clipwise.clipping.thresholds import Constants, Policy
from clipwise.contrib import Adaptive, ByNorm, Multipliers, NormDecay, PublicData, RandomLayer, ReleasedNorms
from clipwise.privacy import SUPPORTED, Adjacency, Sampling, effective_multiplier
from clipwise.sampling.base import Indices
from clipwise.sampling.microbatches import Cut
from tests.soundness.first_step import (
    BATCH,
    DRAWS,
    OF_BATCH,
    ONE_BY_ONE,
    SCALES,
    C,
    D,
    N,
    Pair,
    Setting,
    Two,
    Without,
    any_neighbours,
    coupled,
    turned,
)

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
PARTS: dict[str, Any] = {"all": "all", "layer": "layer", "groups": {"right": ["second"], "left": ["first"]}}


class Scaled(Policy):
    """One part, with layers that are scaled before the clip."""

    def constants(self, max_norm: float, site: Site) -> Constants:
        return Constants({"all": list(site.parameters)}, {"all": max_norm}, {"first.weight": 30.0})

    def describe(self) -> dict[str, Any]:
        return {"rule": "scaled"}


class ByPosition(Cut):
    """An unsound cut, by the position in the draw."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches

    def __call__(self, drawn: Indices) -> list[Indices]:
        return np.array_split(drawn, self._microbatches)


def released(
    setting: Setting, rows: Tensor, model: nn.Module, missing: Indices | None = None, cut: Cut | None = None
) -> tuple[dict[str, Tensor], Private]:
    """The sum of the first step, before noise and division."""
    private = setting.begin(rows, model)
    inner = private.loader._cut if cut is None else cut
    private.loader._cut = inner if missing is None else Without(inner, missing)
    for (x,) in private.loader.pieces():
        if setting.strategy.local_update is not None:
            done = private.step_local_update((x,))
        else:
            losses = model(x)
            done = private.backward(losses if len(losses) else losses.sum())
        if done:
            break
    L = private._context.clipper.divisor
    return {name: p.grad.double() * L for name, p in model.named_parameters()}, private  # type: ignore[union-attr]


def neighbouring(
    setting: Setting, model: nn.Module, pair: Pair
) -> tuple[Private, dict[str, Tensor], dict[str, Tensor]]:
    """The first sums of two neighbouring runs, under the adjacency of the setting."""
    one, private = released(setting, pair.spoiled, model)
    model.zero_grad()
    if setting.adjacency == "zero-out":
        other, _ = released(setting, pair.spoiled, model, missing=pair.victim)
    else:
        other, _ = released(setting, pair.rows, model)
    return private, one, other


def moved(private: Private, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each part's movement over its stated sensitivity."""
    found = {}
    for part in private.parts():
        scales = part.scales or (1.0,) * len(part.parameters)
        changes = [float((one[n] - other[n]).norm()) * m for n, m in zip(part.parameters, scales, strict=True)]
        found[part.name] = math.hypot(*changes) / part.sensitivity
    return found


def stated(setting: Setting, parts: int) -> float:
    """S of a part, computed independently from the definition."""
    norm = C / math.sqrt(parts)
    if setting.adjacency == "replace-one":
        return 2 * norm
    alone = setting.users is not None or setting.strategy.microbatches >= N
    return norm if alone else 2 * norm


def settings_of(sampling: str, adjacency: str, parts: Any, unit: str) -> list[Setting]:
    if unit == "user":
        owners = [i % 10 for i in range(N)]  # four records each
        return [Setting(Batch(C, parts=parts), sampling, adjacency, owners, batch_size=5)]
    counts = (1, 4, BATCH) if sampling in ("partition", "fixed-size") else (1, 4, N)
    return [Setting(Batch(C, microbatches=k, parts=parts), sampling, adjacency) for k in counts]


ALL = [
    setting
    for (sampling, adjacency, unit), parts in itertools.product(OF_BATCH, PARTS.values())
    for setting in settings_of(sampling, adjacency, parts, unit)
]


@pytest.mark.parametrize("setting", ALL, ids=repr)
def test_a_planted_adversary_reaches_the_stated_bound(setting: Setting) -> None:
    """All rows point in one direction; the adversary, a million times as long, in the opposite one, in every part."""
    victim = setting.unit_of(int(setting.largest_piece(Two())[0]))
    private, one, other = neighbouring(setting, Two().double(), turned(victim))
    for part in private.parts():
        assert part.sensitivity == pytest.approx(stated(setting, len(private.parts())), rel=1e-12)
    for share in moved(private, one, other).values():
        assert 1 - 1e-5 < share <= 1 + 1e-12


ANY_PARTS: list[Any] = ["all", "layer", "tensor", RandomLayer(), RandomLayer("tensor")]


@QUICK
@given(
    st.sampled_from(DRAWS),
    st.sampled_from([1, 2, 4, 5, 10, "user"]),
    st.sampled_from(ANY_PARTS),
    st.integers(0, N - 1),
    st.sampled_from(SCALES),
    st.integers(0, 10**6),
)
def test_no_neighbour_exceeds_the_bound(
    draw: tuple[str, str], k: Any, parts: Any, record: int, scale: float, seed: int
) -> None:
    assume(k != "user" or draw in ONE_BY_ONE)
    setting, pair = any_neighbours(draw, k, record, scale, seed, parts=parts)
    private, one, other = neighbouring(setting, coupled(seed), pair)
    shares = moved(private, one, other)
    assert all(share <= 1 for share in shares.values())  # exactly: the clip has a margin for rounding
    if isinstance(parts, RandomLayer):
        assert sum(share > 0 for share in shares.values()) <= 1


@pytest.mark.parametrize(("sampling", "adjacency", "unit"), OF_BATCH)
@pytest.mark.parametrize("is_local", [False, True])
def test_a_whole_run_replayed_on_a_neighbour(sampling: str, adjacency: str, unit: str, is_local: bool) -> None:
    """Each step uses the weights that the first run released; a step without the unit moves nothing."""

    def update(model: nn.Module, microbatch: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(microbatch[0]).mean().backward()
            optimizer.step()

    owners = [i % 10 for i in range(N)] if unit == "user" else None
    strategy = Batch(C, 1 if owners else 5, parts="layer", local_update=update if is_local else None)
    setting = Setting(strategy, sampling, adjacency, owners, batch_size=5 if owners else BATCH)
    random = torch.Generator().manual_seed(8)
    rows = torch.randn(N, 2 * D, generator=random)
    neighbour = rows.clone()
    victim = setting.unit_of(7)
    neighbour[victim] = 50 * torch.randn(len(victim), 2 * D, generator=random)
    models = coupled(1), coupled(2)
    runs = [setting.begin(r, m) for r, m in zip((neighbour, rows), models, strict=True)]
    if adjacency == "zero-out":
        runs[1].loader._cut = Without(runs[1].loader._cut, victim)

    def step(number: int, x: Tensor) -> bool:
        return runs[number].step_local_update((x,)) if is_local else runs[number].step(models[number](x))

    drawn, shifts = [], []
    while runs[0].steps < 6:
        with torch.no_grad():  # both know the released weights
            for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
                q.copy_(p)
        runs[1].declare_update("post-processing", "the weights that the other run released")
        iterators = [iter(run.loader.pieces()) for run in runs]
        is_in = False
        for (x,) in iterators[0]:
            is_in |= bool(np.isin(victim, runs[0].loader.current.indices).any())  # type: ignore[union-attr]
            if step(0, x):
                break
        for (x,) in iterators[1]:
            if step(1, x):
                break
        sums = [
            {n: p.grad.double() * run._context.clipper.divisor for n, p in m.named_parameters()}  # type: ignore[union-attr]
            for run, m in zip(runs, models, strict=True)
        ]
        drawn.append(is_in)
        shifts.append(moved(runs[0], *sums))
    assert any(drawn)
    for is_in, shift in zip(drawn, shifts, strict=True):
        assert all(0 < s <= 1 + 1e-6 if is_in else s == 0 for s in shift.values())


@pytest.mark.parametrize(("sampling", "adjacency"), DRAWS)
@pytest.mark.parametrize("k", [1, 4])
def test_scaled_parts_reach_the_bound_of_the_scaled_sum(sampling: str, adjacency: str, k: int) -> None:
    setting = Setting(Batch(C, k, parts=Scaled()), sampling, adjacency)
    private, one, other = neighbouring(setting, Two().double(), turned(setting.largest_piece(Two())[:1]))
    assert private.parts()[0].sensitivity == 2 * C
    assert 1 - 1e-5 < moved(private, one, other)["all"] <= 1


@pytest.mark.parametrize(("sampling", "adjacency", "unit"), OF_BATCH)
def test_all_local_updates_are_bounded(sampling: str, adjacency: str, unit: str) -> None:
    """The update trains its copy for three steps on rows with one adversarial unit."""

    def trained(model: nn.Module, microbatch: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(microbatch[0]).mean().backward()
            optimizer.step()

    owners = [i // 4 for i in range(N)] if unit == "user" else None
    strategy = Batch(C, 1 if owners else 4, parts="layer", local_update=trained)
    setting = Setting(strategy, sampling, adjacency, owners, batch_size=4 if owners else BATCH)
    victim = setting.unit_of(int(setting.largest_piece(Two())[0]))
    private, one, other = neighbouring(setting, Two().double(), turned(victim))
    assert all(1 - 1e-5 < share <= 1 for share in moved(private, one, other).values())


def public() -> PublicData:
    random = torch.Generator().manual_seed(4)
    rows = TensorDataset(torch.randn(32, 2 * D, generator=random).double())
    return PublicData(rows, lambda model, x: model(x))


POLICIES: dict[str, Any] = {
    "enhanced": lambda: {"parts": Adaptive(public(), of="microbatch", microbatch_size=8, every=1)},
    "zhang": lambda: {"parts": Adaptive(public(), kind="zhang", of="microbatch", microbatch_size=8, every=2)},
    "released": lambda: {"parts": Adaptive(ReleasedNorms(), every=1)},
    "optimal": lambda: {"parts": Multipliers(public(), of="microbatch", microbatch_size=8, every=1)},
    "paper": lambda: {"parts": Multipliers(public(), kind="paper", of="microbatch", microbatch_size=8)},
    "by norm": lambda: {"parts": ByNorm(public(), groups=2, of="microbatch", microbatch_size=8)},
    "random layer": lambda: {"parts": RandomLayer()},
    "decay": lambda: {"max_norm": NormDecay(C, 0.5, every=1), "parts": "layer"},
    "weights": lambda: {"parts": "layer", "split": {"first": 1.0, "second": 3.0}},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unit", ["record", "user"])
def test_every_policy_of_parts_states_what_an_adversary_reaches(policy: str, unit: str) -> None:
    """After a few releases, to which some policies adapt. Between releases the bounds are constant."""
    owners = [i % 10 for i in range(N)] if unit == "user" else None
    strategy = Batch(**{"max_norm": C, "microbatches": 1 if owners else 4, **POLICIES[policy]()})
    model = Two().double()
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        TensorDataset(torch.ones(N, 2 * D).double()),
        clipping=strategy,
        group=owners,
        batch_size=5 if owners else BATCH,
        noise_multiplier=1.0,
        seed=1,
    )
    while private.steps < 3:
        for (x,) in private.loader.pieces():
            private.step(model(x))
    assert effective_multiplier(private.parts()) >= private._context.event.noise_multiplier
    clipper = private._context.clipper
    clipper.secret = b"the draw of this microbatch"
    rows = torch.ones(6, 2 * D).double()
    spoiled = rows.clone()
    spoiled[0] = -1e6
    one = clipper.clipped_sum(model(spoiled))
    # A user is removed with all records; a record leaves the others of its microbatch.
    other = clipper.nothing() if owners else clipper.clipped_sum(model(rows[1:]))  # type: ignore[attr-defined]
    shares = moved(private, one, other)
    assert all(share <= 1 for share in shares.values())
    reached = [share > 1 - 1e-5 for share in shares.values()]
    assert reached.count(True) == (1 if policy == "random layer" else len(reached))


def test_microbatches_cut_by_position_would_break_the_bound() -> None:
    """One record less shifts a record of every microbatch: 7 C and more. Keyed by index, 2 C.

    Rows 3j are huge in direction u for even j and 0 for odd j; the others are small, in direction v for even j
    and -v for odd j. By position, with microbatches of three, the first row of each dominates; without row 0, the
    first row of the next one does.
    """
    k, rows = 8, torch.zeros(24, 2 * D).double()
    rows[0::6, 0] = 1e6
    for j in range(k):
        rows[3 * j + 1 : 3 * j + 3, 1] = 10.0 if j % 2 == 0 else -10.0
    setting = Setting(Batch(C, microbatches=k), "full", "zero-out")
    model, victim = Two().double(), np.array([0])
    found = []
    for cut in (None, ByPosition(k)):
        one, private = released(setting, rows, model, cut=cut)
        model.zero_grad()
        other, _ = released(setting, rows, model, missing=victim, cut=cut)
        model.zero_grad()
        found.append(moved(private, one, other)["all"] * 2)
    assert found[0] <= 2
    assert found[1] > 7


def test_replacement_from_another_microbatch_would_move_two() -> None:
    """Why fixed-size batches are drawn per microbatch: amplification compares a drawn record with a replacement. One
    from another index class moves 4 C; one from the same class moves only one microbatch."""
    k, rows = 4, torch.ones(N, 2 * D).double()
    rows[0] = -1e6  # reverses the class 0, 4, 8, ...
    rows[1::k], rows[1] = -1.0, 1e6  # and so does record 1 with the class 1, 5, 9, ...
    setting, model = Setting(Batch(C, microbatches=k), "full", "zero-out"), Two().double()
    found = []
    for missing in (0, 1):
        model.zero_grad()
        found.append(released(setting, rows, model, missing=np.array([missing]))[0])
    assert math.hypot(*(float((found[0][n] - found[1][n]).norm()) for n in found[0])) > 3.99 * C
    private = Setting(Batch(C, microbatches=k), "fixed-size", "replace-one").begin(rows, Two().double())
    for number in range(50):
        drawn = private._context.scheme.draw(bytes([number]), b"", 0)
        assert np.bincount(drawn % k).tolist() == [BATCH // k] * k


def test_every_supported_pair_is_in_this_file() -> None:
    pairs = {(str(s), str(a)) for s in Sampling for a in SUPPORTED[s] if a is not Adjacency.ADD_REMOVE}
    assert pairs == set(DRAWS)


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("is_local", [False, True])
def test_views_of_an_example_stay_in_its_microbatch(unit: str, is_local: bool) -> None:
    """Three rows per example reach the bound of one example, and do not exceed it."""

    def update(model: nn.Module, microbatch: Any) -> dict[str, Tensor]:
        names, weights = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(model(microbatch[0]).mean(), weights), strict=True))

    owners = [i % 10 for i in range(N)] if unit == "user" else None
    strategy = Batch(C, 1 if owners else 4, parts="layer", local_update=update if is_local else None)
    rows = torch.ones(N, 2 * D).double()
    rows[[i for i in range(N) if i % 10 == 7] if owners else [7]] = -1e6
    found = []
    for is_there in (True, False):
        model = Two().double()
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            TensorDataset(rows),
            clipping=strategy,
            group=owners,
            sampling="full",
            noise_multiplier=0,
            augmentation_multiplicity=3,
        )
        if not is_there:
            gone = np.flatnonzero(np.array(owners) == 7) if owners else np.array([7])
            private.loader._cut = Without(private.loader._cut, gone)
        for (x,) in private.loader.pieces():
            assert len(x) % 3 == 0
            private.step_local_update((x,)) if is_local else private.backward(model(x))
        found.append(
            {n: p.grad.double() * private._context.clipper.divisor for n, p in model.named_parameters()}  # type: ignore[union-attr]
        )
    assert private.parts()[0].sensitivity == pytest.approx((C if owners else 2 * C) / math.sqrt(2))
    assert all(1 - 1e-5 < share <= 1 for share in moved(private, *found).values())
