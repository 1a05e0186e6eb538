"""The joint multiplier of every policy for parts, against a formula of its own: brute force over worst cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipwise.clipping import Bound, PerExample, noised_parts
from clipwise.clipping.base import Split
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Part, effective_multiplier
from tests.clipping.policies import POLICIES, policy, public, small_model
from tests.gradients.cases import trainable
from tests.sites import site

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
sizes_of_parts = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 5000)), min_size=1, max_size=6)


def by_brute_force(parts: Sequence[Part]) -> float:
    """1 / the longest movement, each part in units of its noise, over every set of parts that a unit can move."""
    longest = 0.0
    for moved in itertools.product([False, True], repeat=len(parts)):
        if sum(p.alone for p, is_moved in zip(parts, moved, strict=True) if is_moved) > 1:
            continue  # it is in one of them only
        lengths = [p.sensitivity / p.noise_std for p, is_moved in zip(parts, moved, strict=True) if is_moved]
        longest = max(longest, math.sqrt(math.fsum(x * x for x in lengths)))
    return 1 / longest


def with_sizes(found: list[tuple[float, int]], alone: bool = False) -> tuple[list[Bound], dict[str, nn.Parameter]]:
    bounds = [Bound(str(k), (str(k),), S, alone=alone) for k, (S, _) in enumerate(found)]
    return bounds, {str(k): nn.Parameter(torch.zeros(d)) for k, (_, d) in enumerate(found)}


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize("split", ["optimal", "equal"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_the_given_multiplier(name: str, split: str, adjacency: Adjacency) -> None:
    on, z = small_model(), 0.83
    clipper = PerExample(0.4, policy(name, public()), split).attach(site(on, adjacency))
    parts = noised_parts(clipper.bounds, trainable(on), z, split, clipper.divisor)
    assert by_brute_force(parts) == pytest.approx(z, rel=1e-9)
    assert z <= effective_multiplier(parts) <= z * (1 + 1e-9)
    assert sorted(n for p in parts for n in p.parameters) == sorted(trainable(on))


@QUICK
@given(sizes_of_parts, st.floats(1e-2, 1e2), st.sampled_from(["optimal", "equal"]), st.booleans())
def test_rounding_never_brings_a_step_below_its_event(
    found: list[tuple[float, int]], z: float, split: str, alone: bool
) -> None:
    bounds, on = with_sizes(found, alone)
    parts = noised_parts(bounds, on, z, split, 10.0)
    assert z <= effective_multiplier(parts) <= z * (1 + 1e-9)
    assert by_brute_force(parts) == pytest.approx(z, rel=1e-9)


@QUICK
@given(sizes_of_parts, st.lists(st.floats(0.05, 20), min_size=6, max_size=6), st.floats(1e-2, 1e2))
def test_weights_of_the_noise(found: list[tuple[float, int]], weights: list[float], z: float) -> None:
    """std_h = S_h sigma / p_h is a Gaussian mechanism with mu = sqrt(sum_h p_h^2) / sigma; so sigma = z |p|."""
    bounds, on = with_sizes(found)
    p = dict(zip(on, weights, strict=False))
    parts = noised_parts(bounds, on, z, p, 10.0)
    sigma = z * math.sqrt(math.fsum(w * w for w in p.values()))
    assert [x.noise_std for x in parts] == pytest.approx([x.sensitivity * sigma / p[x.name] for x in parts])
    assert by_brute_force(parts) == pytest.approx(z, rel=1e-9)
    assert effective_multiplier(parts) >= z


@pytest.mark.parametrize(
    "split", [{"0": 1.0}, {"0": 1.0, "1": 1.0, "2": 1.0}, {"0": 1.0, "1": 0.0}, {"0": 1.0, "1": math.nan}], ids=repr
)
def test_weights_that_do_not_fit_the_parts_are_refused(split: Split) -> None:
    bounds, on = with_sizes([(1.0, 3), (2.0, 5)])
    with pytest.raises(ConfigurationError, match="split: give a positive number for each of the parts '0', '1'"):
        noised_parts(bounds, on, 1.0, split, 10.0)


def test_what_is_no_split_is_refused() -> None:
    bounds, on = with_sizes([(1.0, 3), (2.0, 5)])
    with pytest.raises(ConfigurationError, match="split=None is not known: use one of 'optimal', 'equal', or give"):
        noised_parts(bounds, on, 1.0, None, 10.0)  # type: ignore[arg-type]


def test_weights_of_parts_that_a_unit_moves_alone_are_refused() -> None:
    bounds, on = with_sizes([(1.0, 3), (2.0, 5)], alone=True)
    with pytest.raises(ConfigurationError, match="weights are not supported with RandomLayer"):
        noised_parts(bounds, on, 1.0, {"0": 1.0, "1": 2.0}, 10.0)


@QUICK
@given(sizes_of_parts, st.floats(1e-2, 1e2), st.lists(st.floats(0.3, 3), min_size=6, max_size=6))
def test_the_optimal_split_has_the_least_noise(found: list[tuple[float, int]], z: float, weights: list[float]) -> None:
    """Of all splits by weights, which are all that there are at one multiplier."""
    bounds, on = with_sizes(found)

    def energy(split: Split) -> float:
        parts = noised_parts(bounds, on, z, split, 10.0)
        return math.fsum(on[p.name].numel() * p.noise_std**2 for p in parts)

    assert energy("optimal") <= energy(dict(zip(on, weights, strict=False))) * (1 + 1e-9)
    assert energy("optimal") <= energy("equal") * (1 + 1e-9)


@QUICK
@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=5), st.integers(0, 99))
def test_no_change_by_a_unit_is_longer_than_by_brute_force(stds: list[float], seed: int) -> None:
    """Random movements within the sensitivities, which corners bound."""
    random = torch.Generator().manual_seed(seed)
    parts = [Part(str(k), (), 0.5 + k, s) for k, s in enumerate(stds)]
    for share in torch.rand(50, len(parts), generator=random, dtype=torch.float64).tolist():
        moved = math.hypot(*(x * p.sensitivity / p.noise_std for x, p in zip(share, parts, strict=True)))
        assert moved * by_brute_force(parts) <= 1 + 1e-12
