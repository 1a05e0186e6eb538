"""For every policy of parts, one example moves the joint release by at most the stated bound, and reaches it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from clipwise import clipping
from clipwise.clipping import Clipper, PerExample, noised_parts
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.random_layer import Alone
from clipwise.clipping.public import PublicData
from clipwise.clipping.thresholds import Constants
from clipwise.errors import UnsupportedModelError
from clipwise.gradients import METHODS
from clipwise.privacy import Adjacency, Part
from tests.clipping.policies import POLICIES, loss, policy, small_model
from tests.gradients.cases import CASES, Case, losses, trainable, vectors
from tests.sites import site
from tests.soundness.neighbours import Batch, attach, clipped_sum, distance
from tests.soundness.test_bounded import FEW, SIZE, adversaries, neighbours, ordinary

SLACK = 1 + 1e-5
Z = 1.3
NAMES = ("linear", "linear positions", "layer norm", "tied", "conv folded", "embedding")
DEEP = Case("three layers", small_model, vectors(4))
SOME = [DEEP, *(case for case in CASES if case.name in NAMES)]
BY_POLICY = pytest.mark.parametrize("name", POLICIES)


def strategy_of(name: str, case: Case, dtype: torch.dtype, **options: Any) -> PerExample:
    known = PublicData([case.draw(6, dtype, seed=7), case.draw(6, dtype, seed=8)], loss)
    return PerExample(options.pop("max_norm", 0.7), policy(name, known), **options)


def next_release(clipper: Clipper, model: nn.Module, strategy: PerExample) -> tuple[Part, ...]:
    return noised_parts(clipper.bounds, trainable(model), Z, strategy.split, clipper.divisor)


def scaled(part: Part, total: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = part.scales or (1.0,) * len(part.parameters)
    return {n: m * total[n].double() for n, m in zip(part.parameters, scales, strict=True)}


def worst(parts: tuple[Part, ...], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The larger of: a part's movement over its sensitivity; that of all together, each over its noise, times z."""
    moved = [distance(scaled(p, one), scaled(p, other)) for p in parts]
    jointly = math.hypot(*(m / p.noise_std for m, p in zip(moved, parts, strict=True))) * Z
    return max(jointly, *(m / p.sensitivity for m, p in zip(moved, parts, strict=True)))


def worst_over_steps(
    clipper: Clipper, model: nn.Module, strategy: PerExample, one: Batch, other: Batch, steps: int = 3
) -> float:
    """Both neighbours use the releases of the first one, so they have the same bounds in every step."""
    found = 0.0
    for step in range(steps):
        clipper.secret = b"step %d" % step
        clipper.parts = next_release(clipper, model, strategy)
        mine, theirs = (clipped_sum(clipper, model, b) for b in (one, other))
        found = max(found, worst(clipper.parts, mine, theirs))
        noise = clipper.noise
        random = torch.Generator().manual_seed(step)
        clipper.learn(
            {
                n: t.double() / clipper.divisor + noise[n] * torch.randn(t.shape, generator=random, dtype=torch.float64)
                for n, t in mine.items()
            }
        )
    return found


def test_the_cases_are_there() -> None:
    assert {case.name for case in SOME} == {"three layers", *NAMES}


@BY_POLICY
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_one_example_moves_the_joint_release_by_at_most_the_sensitivity(case: Case, name: str) -> None:
    models = {dtype: case.build(dtype) for dtype in (torch.float32, torch.float64)}

    @FEW
    @given(adversaries)
    def run(draw: dict[str, Any]) -> None:
        draw = draw | {"place": SIZE - 1}  # so that the others keep their indices and draws
        mine, removed, replaced = neighbours(case, draw)
        model = models[draw["dtype"]]
        for adjacency, other in ((Adjacency.ZERO_OUT, removed), (Adjacency.REPLACE_ONE, replaced)):
            mode = "clip" if draw["seed"] % 2 else "normalize"
            strategy = strategy_of(name, case, draw["dtype"], mode=mode)
            clipper = attach(model, strategy, adjacency)
            try:
                assert worst_over_steps(clipper, model, strategy, mine, other) <= SLACK
            except UnsupportedModelError:  # then nothing is released
                assert not ordinary(draw)

    run()


def adversary(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Batch, Batch, Batch]:
    """Batches with an example that is clipped in every part, without it, and with its opposite instead."""
    factors = torch.ones(SIZE, dtype=dtype)
    batch = Batch(case.draw(SIZE, dtype, seed=3), factors).distorted(SIZE - 1, "none", 1e6)
    return batch, batch.without(SIZE - 1), batch.distorted(SIZE - 1, "none", -1e6)


@pytest.mark.parametrize("split", ["optimal", "equal"])
@pytest.mark.parametrize("max_norm", [0.7, NormDecay(0.7, 0.5, every=1)], ids=["fixed", "decay"])
@BY_POLICY
def test_a_planted_adversary_reaches_the_bound(name: str, max_norm: Any, split: str) -> None:
    """In each of three steps, under both adjacencies: the stated bound is tight."""
    model = DEEP.build()
    mine, removed, replaced = adversary(DEEP)
    for adjacency, other in ((Adjacency.ZERO_OUT, removed), (Adjacency.REPLACE_ONE, replaced)):
        strategy = strategy_of(name, DEEP, torch.float64, max_norm=max_norm, split=split)
        clipper = attach(model, strategy, adjacency)
        for _ in range(3):
            found = worst_over_steps(clipper, model, strategy, mine, other, steps=1)
            assert 0.999 < found <= SLACK


@BY_POLICY
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_sum(name: str, method: str) -> None:
    model = DEEP.build()
    batch = Batch(DEEP.draw(SIZE, torch.float64, seed=3), torch.tensor([1.0, 30.0, 1e-3, 1e6]).double())
    found = []
    for m in (method, "loop"):
        clipper = attach(model, strategy_of(name, DEEP, torch.float64, method=m))
        clipper.secret = b"secret"
        found.append(clipped_sum(clipper, model, batch))
    for n, t in found[1].items():
        torch.testing.assert_close(found[0][n], t, rtol=1e-10, atol=1e-10)


@BY_POLICY
def test_a_planted_adversary_reverses_a_clipped_mean_at_most(name: str) -> None:
    """`Batch` with every policy: 2C for an added record and for a replaced one."""
    model = DEEP.build()
    known = PublicData([DEEP.draw(6, seed=7), DEEP.draw(6, seed=8)], loss)
    x = DEEP.draw(1, seed=3)[0].expand(2, -1)
    mine, removed, replaced = (torch.tensor(f).double() for f in ([1e4, -1e8], [1e4], [1e4, 1e8]))
    for adjacency, other in ((Adjacency.ZERO_OUT, removed), (Adjacency.REPLACE_ONE, replaced)):
        strategy = clipping.Batch(0.7, parts=policy(name, known))
        clipper = strategy.attach(site(model, adjacency))
        for step in range(2):
            clipper.secret = b"step %d" % step
            clipper.parts = noised_parts(clipper.bounds, trainable(model), Z, "optimal", clipper.divisor)
            one, two = (clipper.clipped_sum(losses(model, (x[: len(f)],)) * f) for f in (mine, other))
            assert 0.999 < worst(clipper.parts, one, two) <= SLACK
            clipper.learn({n: t.double() / clipper.divisor for n, t in one.items()})


def _named(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


# The tests above can fail


def _everywhere(constants: Constants, secret: bytes, vectors: int) -> dict[str, Tensor]:
    """Every vector contributes to every part."""
    return {part: torch.ones(vectors, dtype=torch.bool) for part in constants.groups}


def test_an_example_in_several_parts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (mine, removed, _) = DEEP.build(), adversary(DEEP)
    strategy = strategy_of("random tensor", DEEP, torch.float64)

    def found() -> float:
        return worst_over_steps(attach(model, strategy), model, strategy, mine, removed, steps=1)

    assert len(attach(model, strategy).bounds) > 1 and found() <= SLACK
    monkeypatch.setattr(Alone, "chosen", _everywhere)
    assert found() > 1.2


def test_noise_of_the_step_before_is_caught() -> None:
    """The bound of `zhang` grows with the norms on public data, and the noise must follow."""
    case = _named("linear")
    model, (mine, removed, _) = case.build(), adversary(case)
    strategy = strategy_of("zhang", case, torch.float64)
    clipper = attach(model, strategy)
    stale = next_release(clipper, model, strategy)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    assert clipper.learn({})
    one, other = (clipped_sum(clipper, model, b) for b in (mine, removed))
    assert worst(next_release(clipper, model, strategy), one, other) <= SLACK
    assert worst(stale, one, other) > 1.5


def test_a_clip_without_the_scales_is_detected() -> None:
    case = _named("linear")
    model, (mine, removed, _) = case.build(), adversary(case)
    strategy = strategy_of("paper", case, torch.float64)
    clipper = attach(model, strategy)
    parts = next_release(clipper, model, strategy)
    clipper._constants.scales = {}  # type: ignore[attr-defined]
    one, other = (clipped_sum(clipper, model, b) for b in (mine, removed))
    assert worst(parts, one, other) > 1.01
