"""Parts, events and the joint noise multiplier."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from clipwise.privacy import (
    SUPPORTED,
    Adjacency,
    Event,
    Part,
    Sampling,
    Spent,
    Unit,
    effective_multiplier,
    require_supported,
    split_noise,
)

sensitivities = st.floats(1e-6, 1e6)
multipliers = st.floats(1e-3, 1e3)
dimensions = st.integers(1, 10**9)
several = st.lists(st.tuples(sensitivities, dimensions), min_size=1, max_size=30)
splits = st.sampled_from(["equal", "optimal"])


def parts_of(sizes: list[tuple[float, int]], z: float, split: str) -> list[Part]:
    bounds, counts = [s for s, _ in sizes], [d for _, d in sizes]
    stds = split_noise(bounds, counts, z, split)
    return [Part(f"part {k}", (), s, std) for k, (s, std) in enumerate(zip(bounds, stds, strict=True))]


def squared_noise(sizes: list[tuple[float, int]], stds: list[float]) -> float:
    return sum(d * std**2 for (_, d), std in zip(sizes, stds, strict=True))


@given(several, multipliers, splits)
def test_every_split_gives_the_given_multiplier(sizes: list[tuple[float, int]], z: float, split: str) -> None:
    assert effective_multiplier(parts_of(sizes, z, split)) == pytest.approx(z, rel=1e-9)


@given(several, multipliers)
def test_the_optimal_split_adds_no_more_noise_than_equal(sizes: list[tuple[float, int]], z: float) -> None:
    optimal, equal = ([p.noise_std for p in parts_of(sizes, z, split)] for split in ("optimal", "equal"))
    assert squared_noise(sizes, optimal) <= squared_noise(sizes, equal) * (1 + 1e-9)


@given(several, multipliers, st.lists(st.floats(0.1, 10), min_size=30, max_size=30))
def test_no_other_split_of_the_same_multiplier_adds_less_noise(
    sizes: list[tuple[float, int]], z: float, factors: list[float]
) -> None:
    """Any other split with the same z has a larger expected squared noise."""
    optimal = parts_of(sizes, z, "optimal")
    moved = [Part(p.name, (), p.sensitivity, p.noise_std * f) for p, f in zip(optimal, factors, strict=False)]
    scale = z / effective_multiplier(moved)
    least = squared_noise(sizes, [p.noise_std for p in optimal])
    assert least <= squared_noise(sizes, [p.noise_std * scale for p in moved]) * (1 + 1e-9)


@pytest.mark.slow
@given(several, multipliers)
def test_the_equal_split_gives_every_part_the_same_multiplier(sizes: list[tuple[float, int]], z: float) -> None:
    for part in parts_of(sizes, z, "equal"):
        assert part.noise_std / part.sensitivity == pytest.approx(z * math.sqrt(len(sizes)))


@given(sensitivities, dimensions, multipliers, splits)
def test_one_part_gets_z_times_its_sensitivity(s: float, d: int, z: float, split: str) -> None:
    assert split_noise([s], [d], z, split) == [pytest.approx(z * s)]


def test_a_worked_split() -> None:
    # Two parts of sensitivity 1 with 1 and 16 coordinates: sum_j S_j sqrt(d_j) = 5, s = (sqrt 5, sqrt(5/4)).
    assert split_noise([1, 1], [1, 16], 1.0, "optimal") == pytest.approx([math.sqrt(5), math.sqrt(1.25)])
    assert split_noise([3, 4], [1, 16], 0.5, "equal") == pytest.approx([1.5 * math.sqrt(2), 2 * math.sqrt(2)])


@given(several, multipliers, splits, st.data())
def test_a_subset_of_the_parts_is_more_private(
    sizes: list[tuple[float, int]], z: float, split: str, choice: st.DataObject
) -> None:
    parts = parts_of(sizes, z, split)
    some = choice.draw(st.lists(st.sampled_from(parts), unique_by=lambda p: p.name))
    assert effective_multiplier(some) >= z * (1 - 1e-9)


def test_the_joint_multiplier_gives_the_true_privacy_curve() -> None:
    """A neighbour moves every part by its sensitivity. delta(epsilon) = E max(0, 1 - e^(epsilon - loss)), drawn
    here for each part, is that of one Gaussian mechanism with mu = 1 / z."""
    random = np.random.default_rng(0)
    z, epsilon = 0.8, 1.0
    parts = parts_of([(1.0, 1), (2.0, 4), (0.5, 9)], z, "optimal")
    loss = np.zeros(1_000_000)
    for part in parts:
        y = part.sensitivity + part.noise_std * random.standard_normal(len(loss))
        loss += (y**2 - (y - part.sensitivity) ** 2) / (2 * part.noise_std**2)
    drawn = np.maximum(0, -np.expm1(epsilon - loss)).mean()
    normal, mu = NormalDist(), 1 / z
    exact = normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
    assert drawn == pytest.approx(exact, rel=0.01)


def test_a_part_without_noise_leaves_nothing_private() -> None:
    with_noise, without = Part("a", (), 1.0, 1.0), Part("b", (), 1.0, 0.0)
    assert effective_multiplier([with_noise, without]) == 0
    assert split_noise([1, 2], [3, 4], 0.0, "optimal") == [0, 0]
    assert effective_multiplier([with_noise, Part("c", (), 0.0, 0.0)]) == 1  # a part with sensitivity 0 needs no noise
    assert effective_multiplier([]) == math.inf


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"split='fair'.*'equal' or 'optimal'"):
        split_noise([1.0], [1], 1.0, "fair")


events = st.builds(
    lambda pair, unit, z, rate, period, excess: Event(
        pair[0],
        pair[1],
        unit,
        z,
        1.0 if pair[0] is Sampling.FULL else 1 / period if pair[0] is Sampling.SHUFFLED else rate,
        period if pair[0] is Sampling.SHUFFLED else 1,
        excess if pair[0] is Sampling.TRUNCATED_POISSON or pair == (Sampling.FULL, Adjacency.ZERO_OUT) else 0.0,
    ),
    st.sampled_from([(s, a) for s, allowed in SUPPORTED.items() for a in allowed]),
    st.sampled_from(Unit),
    st.floats(0, 1e6),
    st.floats(1e-9, 1.0),
    st.integers(1, 10**6),
    st.floats(0, 1),
)


@given(events)
def test_an_event_survives_json(event: Event) -> None:
    plain = json.loads(json.dumps(event.to_dict()))
    assert Event.from_dict(plain) == event
    assert all(type(v) in (str, float, int) for v in plain.values())
    assert ("excess" in plain) == (event.excess > 0)  # older readers understand what they can account for


@pytest.mark.parametrize("sampling", Sampling)
@pytest.mark.parametrize("adjacency", Adjacency)
def test_only_proven_pairs_are_accepted(sampling: Sampling, adjacency: Adjacency) -> None:
    if adjacency in SUPPORTED[sampling]:
        require_supported(sampling, adjacency)
    else:
        with pytest.raises(ConfigurationError, match=f"adjacency='{adjacency}'.*sampling='{sampling}'.*use '"):
            Event(sampling, adjacency, Unit.RECORD, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.1}, "sample_rate"),
        ({"sample_rate": math.nan}, "sample_rate"),
        ({"period": 0}, "period"),
        ({"period": 2}, "period"),
        ({"sampling": Sampling.FULL}, "sample_rate"),
        ({"sampling": Sampling.FIXED_SIZE}, "adjacency"),
        ({"excess": 1e-9}, "excess"),
        ({"sampling": Sampling.FULL, "sample_rate": 1.0, "excess": 1.1}, "excess"),
        ({"sampling": Sampling.FULL, "sample_rate": 1.0, "adjacency": Adjacency.REPLACE_ONE, "excess": 1e-9}, "excess"),
        ({"sampling": Sampling.TRUNCATED_POISSON, "excess": -1e-9}, "excess"),
        ({"sampling": Sampling.TRUNCATED_POISSON, "excess": 1.1}, "excess"),
        ({"sampling": Sampling.TRUNCATED_POISSON, "excess": math.nan}, "excess"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused(changed: dict[str, Any], named: str) -> None:
    good = {
        "sampling": Sampling.POISSON,
        "adjacency": Adjacency.ZERO_OUT,
        "unit": Unit.RECORD,
        "noise_multiplier": 1.0,
        "sample_rate": 0.5,
    }
    Event(**good)
    with pytest.raises(ConfigurationError, match=named):
        Event(**{**good, **changed})


def test_the_words_are_those_of_the_interface() -> None:
    schemes = ["poisson", "truncated-poisson", "fixed-size", "partition", "shuffled", "full"]
    assert [str(s) for s in Sampling] == schemes
    assert [str(a) for a in Adjacency] == ["zero-out", "add-remove", "replace-one"]
    spent = Spent(1.5, 1e-5, Adjacency.ZERO_OUT, Unit.RECORD, Sampling.POISSON, 7, "pld")
    text = "epsilon=1.5 at delta=1e-05 (zero-out of one record, poisson sampling, 7 steps, pld)"
    assert str(spent) == text and str(replace(spent, reproducible=True)).endswith(f" with a fresh key {text}")


def test_of_parts_that_are_moved_alone_the_worst_one_counts() -> None:
    """Together with a part that every unit moves: 1 / z^2 = (1 / 2)^2 + max(1, 1 / 4)^2."""
    alone = [Part("a", ("a",), 1.0, 1.0, alone=True), Part("b", ("b",), 1.0, 4.0, alone=True)]
    for parts in (alone, alone[::-1]):
        assert effective_multiplier(parts) == 1
        assert effective_multiplier([*parts, Part("c", ("c",), 1.0, 2.0)]) == pytest.approx(1.25**-0.5)
