"""Standard normals from words: both parts of the density, the tails to their end, and their tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from clipwise.noise import standard_normal
from clipwise.noise.standard_normal import EDGE, REST_BITS, STRIPS, TABLE_BITS, fill, rest_of

STEP = 1 / STRIPS
LEFT, LOW, COUNTS = standard_normal._boxes()
TAIL = float(stats.norm.sf(EDGE))


def random_words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, size=count, dtype=np.uint64)


class Fed:
    """Returns given words, in place of a bit generator."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def random_raw(self, count: int) -> np.ndarray:
        found, self.words = self.words[:count].copy(), self.words[count:]
        return found


def tail_words(count: int, furthest: float = 1.0, bits: int = 52, seed: int = 0) -> np.ndarray:
    """Proposals in the tails, on both sides, with Phi(-R) U of a grid of 2^bits points; U below `furthest`."""
    rng = np.random.default_rng(seed)
    side = rng.integers(0, 2, size=count, dtype=np.uint64) << np.uint64(64 - REST_BITS)
    place = rng.integers(0, max(1, math.ceil(furthest * 2**bits)), size=count, dtype=np.uint64) << np.uint64(52 - bits)
    return np.ascontiguousarray(np.stack([side | place, np.zeros(count, np.uint64)], 1).ravel())


def tail_p_value(normals: np.ndarray, sigma: float) -> float:
    """KS test that normals beyond sigma, on either side, have the law of a normal there."""
    beyond = np.abs(normals)[np.abs(normals) > sigma]
    assert len(beyond) > 0.9 * len(normals)
    return float(stats.kstest(np.exp(stats.norm.logsf(beyond) - stats.norm.logsf(sigma)), "uniform").pvalue)


def test_every_box_lies_under_the_curve_and_every_proposal_above_it() -> None:
    x = LEFT[:, None] + STEP * np.linspace(0, 1, 33)
    density = stats.norm.pdf(x)
    assert (LOW[:, None] <= density).all()
    height = np.zeros(len(LEFT))
    _, places = np.unique(standard_normal._REST_LEFT[2:], return_index=True)
    size = np.flatnonzero(np.isinf(standard_normal._REST_LOW))[0] if np.isinf(standard_normal._REST_LOW).any() else None
    strips = np.rint((standard_normal._REST_LEFT[2:size] + STEP + EDGE) * STRIPS).astype(int)
    assert len(places) >= len(LEFT) and set(strips) == set(range(len(LEFT)))
    height[strips] = standard_normal._REST_HEIGHT[2:size]
    assert (LOW[:, None] + height[:, None] >= density).all()


def test_the_entries_have_the_mass_of_their_strip() -> None:
    assert np.array_equal(COUNTS * 2.0**-TABLE_BITS, LOW * STEP)
    entries = standard_normal._LEFT[~np.isnan(standard_normal._LEFT)]
    assert np.array_equal(np.unique(entries, return_counts=True)[1], COUNTS[COUNTS > 0])
    # Proposals: a strip has m_k entries for the height h_k, in the same ratio as the tails have for their probability.
    size = (standard_normal._REST_HEIGHT[2:] > 0).sum() + 2
    values, first, counts = np.unique(standard_normal._REST_LEFT[2:size], return_index=True, return_counts=True)
    per_mass = counts / (standard_normal._REST_HEIGHT[2:size][first] * STEP)
    assert len(values) == len(LEFT)
    np.testing.assert_allclose(per_mass, standard_normal._TAIL_ACCEPTED / TAIL, rtol=1e-12)


def rest_distribution(x: np.ndarray) -> np.ndarray:
    """The distribution function of phi - boxes."""
    boxes = (np.clip((x[:, None] - LEFT) / STEP, 0, 1) * (COUNTS * 2.0**-TABLE_BITS)).sum(1)
    return np.asarray((stats.norm.cdf(x) - boxes) / (1 - COUNTS.sum() * 2.0**-TABLE_BITS))


@pytest.mark.slow
def test_the_rest_has_the_law_of_what_the_boxes_leave() -> None:
    values = rest_of(random_words(1 << 19))
    assert stats.kstest(values[:40_000], rest_distribution).pvalue > 1e-3
    # The tails with the probability that they have: 0.03% of the rest.
    share = 2 * TAIL / (1 - COUNTS.sum() * 2.0**-TABLE_BITS)
    outside = int((np.abs(values) > EDGE).sum())
    assert abs(outside - share * len(values)) < 5 * math.sqrt(share * len(values))


def test_a_rest_without_its_boxes_is_found() -> None:
    values = np.random.default_rng(0).standard_normal(40_000)  # phi in place of phi - boxes
    assert stats.kstest(values, rest_distribution).pvalue < 1e-6


@pytest.mark.parametrize("sigma", [4.6, 5.8, 7.0, 8.0, 9.0])
def test_the_tail_has_the_law_of_a_normal(sigma: float) -> None:
    normals = rest_of(tail_words(20_000, stats.norm.sf(sigma) / TAIL))
    assert len(normals) == 20_000
    assert tail_p_value(normals, sigma) > 1e-3
    assert abs(int((normals > 0).sum()) - 10_000) < 5 * math.sqrt(5_000)


def test_the_tail_test_rejects_uniforms_of_24_bits() -> None:
    sigma = 7.0
    normals = rest_of(tail_words(20_000, stats.norm.sf(sigma) / TAIL, bits=24))
    assert tail_p_value(normals[np.abs(normals) > sigma], sigma) < 1e-12


def test_the_largest_normal_is_the_stated_one() -> None:
    for side, sign in ((0, 1), (1, -1)):
        (largest,) = rest_of(np.array([side << (64 - REST_BITS), 0], np.uint64))
        assert 9.6 < -sign * largest < 9.61
        assert -sign * largest == pytest.approx(stats.norm.isf(TAIL * 2.0**-53), rel=1e-9)
    assert 2 * stats.norm.sf(9.6) < 1e-21


def test_a_proposal_of_a_tail_is_accepted_with_the_stated_probability() -> None:
    words = tail_words(200_000)
    words[1::2] = random_words(200_000, 1)
    accepted, p = len(rest_of(words)) / 200_000, standard_normal._TAIL_ACCEPTED
    assert 0 < p <= 1 and abs(accepted - p) < 5 * math.sqrt(p * (1 - p) / 200_000)


def test_a_word_gives_the_place_in_its_strip() -> None:
    entry = 5000
    left = standard_normal._LEFT[entry] + STEP
    places = np.array([0, 1, 2**49, 2**50 - 1], np.uint64)
    values = np.empty(4)
    fill(values, np.empty(4, np.uint64), Fed(np.uint64(entry << 50) | places), Fed(random_words(0)))  # type: ignore[arg-type]
    np.testing.assert_allclose(values, left + STEP * places.astype(float) * 2.0**-50, rtol=0, atol=2.0**-51)
    assert (values >= left).all() and (values <= left + STEP).all()


def test_values_that_are_missing_come_from_the_rest_in_order() -> None:
    rest = random_words(4000)
    values = np.empty(1000)
    words = Fed(np.full(1000, 2**64 - 1, np.uint64))  # the last entry asks for a value of the rest
    fill(values, np.empty(1000, np.uint64), words, Fed(rest))  # type: ignore[arg-type]
    assert np.array_equal(values, rest_of(rest.copy())[:1000])


def test_whole_draws_are_normal_in_fine_cells() -> None:
    """Cells of a quarter of a strip, so that a wrong box or rest shows."""
    count = 1 << 21
    values = np.empty(count)
    streams = (np.random.Philox(key=np.array([7, seed], np.uint64)) for seed in (0, 1))
    fill(values, np.empty(count, np.uint64), *streams)
    edges = np.concatenate([[-np.inf], np.arange(-3, 3 + 1e-9, STEP / 4), [np.inf]])
    expected = np.diff(stats.norm.cdf(edges)) * count
    found = np.histogram(values, edges)[0]
    assert stats.chisquare(found, expected, sum_check=False).pvalue > 1e-3


def test_the_parts_sum_to_the_density() -> None:
    mass = sum(quad(stats.norm.pdf, left, left + STEP)[0] - low * STEP for left, low in zip(LEFT, LOW, strict=True))
    assert mass + 2 * TAIL == pytest.approx(1 - COUNTS.sum() * 2.0**-TABLE_BITS, abs=1e-12)
