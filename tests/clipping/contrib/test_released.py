"""Typical norms from releases: how accurate they are, and that only releases are needed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clipwise import PerExample
from clipwise.clipping import noised_parts
from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers, multipliers
from clipwise.clipping.contrib.typical import Estimated, ReleasedNorms
from clipwise.clipping.thresholds import Policy
from clipwise.errors import ConfigurationError
from clipwise.privacy import Part, effective_multiplier
from tests.clipping.contrib.test_adaptive import LAYERS
from tests.clipping.policies import small_model
from tests.gradients.cases import trainable
from tests.runs import LAYERS as RUN_LAYERS
from tests.runs import gradients, losses_of, network, private_run
from tests.sites import site


def estimated(memory: float = 0.9) -> Estimated:
    return Estimated(ReleasedNorms(memory), site(small_model()).parameters, LAYERS)


def release(norms: dict[str, float], noise: float, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Mean gradients with these norms per layer, with noise on every coordinate."""
    random = torch.Generator().manual_seed(seed)
    means, on = {}, trainable(small_model())
    for h, names in LAYERS.items():
        d = sum(on[n].numel() for n in names)
        for n in names:
            g = torch.full(on[n].shape, norms[h] / math.sqrt(d), dtype=torch.float64)
            means[n] = g + noise * torch.randn(g.shape, generator=random, dtype=torch.float64)
    return means, dict.fromkeys(means, noise)


@pytest.mark.parametrize("memory", [1, -0.1, True, "0.9", math.nan], ids=repr)
def test_memory_is_a_share_below_1(memory: Any) -> None:
    with pytest.raises(ConfigurationError, match="ReleasedNorms: memory"):
        ReleasedNorms(memory)


def test_without_noise_it_is_the_norm() -> None:
    typical = estimated()
    truth = {"0": 3.0, "2": 0.5, "4": 0.04}
    typical.observe(*release(truth, 0.0, seed=0))
    assert typical.renew() and typical.norms == pytest.approx(truth)


@pytest.mark.slow
def test_the_energy_of_the_noise_is_taken_off() -> None:
    """Here it is larger than that of the gradient: 40 coordinates in the first layer."""
    typical, truth = estimated(memory=0.999), {"0": 3.0, "2": 1.0, "4": 0.5}
    for seed in range(2000):
        typical.observe(*release(truth, 0.7, seed))
    assert typical.renew()
    assert typical.norms == pytest.approx(truth, rel=0.15)


def test_what_noise_hides_is_taken_to_be_as_large_as_it_could_be_hidden() -> None:
    """sqrt(sqrt(2 d) s^2) after one release: the standard error of |released|^2 - d s^2."""
    typical = estimated(memory=0.0)
    typical.observe(*release({"0": 1e3, "2": 0.0, "4": 0.0}, 2.0, seed=3))
    assert typical.renew()
    sizes = {h: sum(trainable(small_model())[n].numel() for n in LAYERS[h]) for h in LAYERS}
    for h in ("2", "4"):
        assert typical.norms[h] >= math.sqrt(math.sqrt(2 * sizes[h]) * 4.0) * (1 - 1e-12)
    assert typical.norms["2"] < 30


def test_an_old_release_is_forgotten() -> None:
    typical = estimated(memory=0.5)
    typical.observe(*release({"0": 1e3, "2": 1e3, "4": 1e3}, 0.0, seed=0))
    for _ in range(60):
        typical.observe(*release({"0": 2.0, "2": 1.0, "4": 1.0}, 0.0, seed=0))
    typical.renew()
    assert typical.norms == pytest.approx({"0": 2.0, "2": 1.0, "4": 1.0}, rel=1e-3)


def test_before_the_first_release_all_coordinates_are_alike() -> None:
    typical = estimated()
    assert typical.norms == pytest.approx({"0": math.sqrt(40), "2": math.sqrt(27), "4": math.sqrt(8)})
    assert not typical.renew()


def test_a_release_that_is_not_finite_is_passed_over() -> None:
    typical = estimated()
    typical.observe(*release({"0": 3.0, "2": 1.0, "4": 1.0}, 0.0, seed=0))
    means, noise = release({"0": 3.0, "2": 1.0, "4": 1.0}, 0.0, seed=0)
    typical.observe({**means, "0.bias": means["0.bias"] * math.inf}, noise)
    assert typical.renew() and typical.norms["0"] == pytest.approx(3.0)


def test_the_noise_of_a_release_is_that_of_its_parts() -> None:
    """s / (m L), with the factors and the divisor of the strategy."""
    clipper = PerExample(1.0, Multipliers(ReleasedNorms())).attach(site(small_model()))
    clipper.parts = (Part("all", ("a", "b"), 1.0, 3.0, scales=(2.0, 0.5)), Part("rest", ("c",), 1.0, 7.0))
    assert clipper.noise == pytest.approx({"a": 0.15, "b": 0.6, "c": 0.7})


@pytest.mark.parametrize("kind", ["bounds", "multipliers"])
def test_constants_follow_what_was_released(kind: str) -> None:
    on, e = small_model(), {"0": 0.1, "2": 0.4, "4": 2.0}
    rule: Policy = (
        Adaptive(ReleasedNorms(0.5), every=2) if kind == "bounds" else Multipliers(ReleasedNorms(0.5), every=2)
    )
    clipper = PerExample(0.7, rule).attach(site(on))
    for step in range(4):
        clipper.parts = noised_parts(clipper.bounds, trainable(on), 1e-9, "optimal", clipper.divisor)
        means, _ = release(e, 0.0, step)
        assert clipper.learn(means) is (step % 2 == 1)
    if kind == "bounds":
        expected = [0.7 * x / 2.0 for x in e.values()]
        assert [b.sensitivity for b in clipper.bounds] == pytest.approx(expected, rel=1e-6)
    else:
        sizes = {h: sum(trainable(on)[n].numel() for n in LAYERS[h]) for h in LAYERS}
        m = multipliers(e, sizes, "optimal", keep_length=True)
        by_name = {n: m[h] for h in LAYERS for n in LAYERS[h]}
        (bound,) = clipper.bounds
        assert bound.scales == pytest.approx([by_name[n] for n in bound.parameters], rel=1e-6)


@pytest.mark.parametrize("z", [0.0, 0.8])
@pytest.mark.parametrize("policy", [Adaptive, Multipliers])
def test_a_run_learns_from_its_own_releases(policy: Any, z: float) -> None:
    """Written down a second time: from the gradients that the run left in `.grad`."""
    on, private = private_run(clipping=PerExample(0.8, policy(ReleasedNorms(0.7), every=1)), noise_multiplier=z)
    second = Estimated(ReleasedNorms(0.7), site(network()).parameters, RUN_LAYERS)
    for _ in range(2):
        for batch in private.loader:
            L, noise = private._context.clipper.divisor, {}
            for part in private.parts():
                for n, m in zip(part.parameters, part.scales or (1.0,) * len(part.parameters), strict=True):
                    noise[n] = part.noise_std / (m * L)
            private.step(losses_of(on, batch))
            second.observe(gradients(on), noise)
            second.renew()
            assert private._context.clipper.state_dict()["typical"] == pytest.approx(second.norms)
            assert z <= effective_multiplier(private.parts()) <= z * (1 + 1e-9)
    assert private._context.clipper.state_dict()["releases"] == 10
    assert "released" in json.dumps(private.statement().to_dict()["strategy"])


def test_rules_that_never_look_again_are_refused() -> None:
    for rule in (Adaptive, Multipliers, ByNorm):
        with pytest.raises(ConfigurationError, match=f"{rule.__name__}: every=None"):
            rule(ReleasedNorms(), every=None)


def test_a_state_goes_back_to_where_it_was() -> None:
    one, other = estimated(), estimated()
    for seed in range(3):
        one.observe(*release({"0": 3.0, "2": 1.0, "4": 1.0}, 0.3, seed))
    one.renew()
    other.load_state_dict(one.state_dict())
    assert other.norms == one.norms
    for typical in (one, other):
        typical.observe(*release({"0": 3.0, "2": 1.0, "4": 1.0}, 0.3, 9))
        typical.renew()
    assert other.norms == one.norms and other.state_dict() == one.state_dict()
    state = one.state_dict()
    for running in ({}, state["running"] | {"weight": None}, state["running"] | {"squares": {"0": 1.0}}):
        with pytest.raises((KeyError, ValueError)):
            other.load_state_dict(state | {"running": running})
