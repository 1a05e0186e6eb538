"""The rounded Gaussian: its law, to the end of the tail; that it is exact; and what it may depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("cryptography")

from clipwise.noise.key import NoiseKey
from clipwise.noise.secure import rounded
from clipwise.noise.secure.cipher import words
from clipwise.noise.secure.rounded import _CHUNK, _decide, _radii, nearest_pair, rounded_gaussian
from tests.noise.secure.test_exact import pair

SECRET = bytes(range(1, 33))
SEVERAL_CHUNKS = 8 * _CHUNK + 1001


def derived(label: str = "secure/0/0/0") -> bytes:
    return NoiseKey(SECRET).derive(label)


# ---- the law --------------------------------------------------------------------------------------------


def test_a_fine_draw_is_normal() -> None:
    count, ratio = 1 << 20, 1.7 * 2.0**25
    z = rounded_gaussian(derived("law"), count, ratio).numpy() / ratio
    # mean, variance, skewness and kurtosis, each with the standard error of its moment
    for power, expected, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 4 * math.sqrt(error / count)
    assert stats.kstest(z, "norm").pvalue > 1e-3


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.7])
def test_a_coarse_draw_has_the_probabilities_of_a_rounded_gaussian(ratio: float) -> None:
    count = 1 << 19
    k = rounded_gaussian(derived("coarse"), count, ratio).numpy()
    last = math.floor(4 * ratio)
    edges = (np.arange(-last - 1, last + 1) + 0.5) / ratio
    expected = count * np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]])))
    places = np.clip(k, -last - 1, last + 1).astype(int) + last + 1
    found = np.bincount(places, minlength=len(expected))
    assert stats.chisquare(found, expected).pvalue > 1e-3


def test_neighbours_in_a_draw_are_independent() -> None:
    z = rounded_gaussian(derived("law"), 1 << 19, 2.0**20).numpy()
    transforms: tuple[Callable[[np.ndarray], np.ndarray], ...] = (lambda v: v, np.abs, np.square)
    for lag in (1, 2, 3, 4):
        for transform in transforms:  # a shared radius shows in the even ones
            for offset in (0, 1):
                a, b = transform(z[offset:-lag:2]), transform(z[offset + lag :: 2])
                m = min(len(a), len(b))
                assert abs(np.corrcoef(a[:m], b[:m])[0, 1]) < 5 / math.sqrt(m)


def small_radius_words(below: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the words of radii be uniform below a limit, as they are beyond the radius that belongs to it."""
    random = np.random.default_rng(0)

    def fed(key: bytes, use: int, index: int, count: int) -> np.ndarray:
        found = words(key, use, index, count)
        return random.integers(0, below, count, dtype=np.uint64) if use == rounded._RADII else found

    monkeypatch.setattr(rounded, "words", fed)


@pytest.mark.parametrize("sigma", [5.8, 7.0, 8.0, 9.0])
def test_the_tail_is_that_of_a_normal(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs with a radius beyond sigma the values beyond sigma are all that there are."""
    small_radius_words(max(round(2.0**64 * math.exp(-(sigma**2) / 2)), 1), monkeypatch)
    ratio = 2.0**20
    z = rounded_gaussian(derived(), 4000, ratio).numpy() / ratio
    radius = np.hypot(z[0::2], z[1::2])
    assert radius.min() > sigma - 1e-2
    assert stats.kstest(np.exp((sigma**2 - radius**2) / 2), "uniform").pvalue > 1e-3
    beyond = np.abs(z)[np.abs(z) > sigma]
    assert len(beyond) > 100
    assert stats.kstest(np.exp(stats.norm.logsf(beyond) - stats.norm.logsf(sigma)), "uniform").pvalue > 1e-3


def test_a_word_that_is_zero_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    small_radius_words(1, monkeypatch)
    z = rounded_gaussian(derived(), 2000, 2.0**20).numpy() / 2.0**20
    radius = np.hypot(z[0::2], z[1::2])
    least = math.sqrt(2 * 64 * math.log(2))
    assert radius.min() > least - 1e-5
    assert stats.kstest(np.exp((least**2 - radius**2) / 2), "uniform").pvalue > 1e-3


# ---- exactness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.3, 1.3 * 2.0**20, 1.7 * 2.0**36, 1.1 * 2.0**42])
def test_every_value_is_the_one_that_exact_arithmetic_gives(ratio: float) -> None:
    pairs = 300
    drawn = rounded_gaussian(derived(), 2 * pairs, ratio).tolist()
    k, a = (words(derived(), use, 0, pairs).tolist() for use in (rounded._RADII, rounded._ANGLES))
    for j in range(pairs):
        assert tuple(drawn[2 * j : 2 * j + 2]) == _decide(derived(), j, k[j], a[j], ratio)


def test_further_words_belong_to_the_pair_and_continue_with_its_bits() -> None:
    """A word of 0 is never enough."""
    key, ratio = derived(), 2.0**40
    found = _decide(key, 5, 0, 2**63 + 12345, ratio)
    further = words(key, rounded._FURTHER, 5, 4).tolist()
    k, a, bits = 0, 2**63 + 12345, 64
    for more in (further[:2], further[2:]):
        k, a, bits = k << 64 | more[0], a << 64 | more[1], bits + 64
    assert found == nearest_pair(k, a, bits, ratio)
    assert found != _decide(key, 6, 0, 2**63 + 12345, ratio)


WORDS = (st.integers(1, 2**64 - 1) | st.integers(0, 63).map(lambda b: 1 << b) | st.integers(1, 2**20)) | st.integers(
    1, 2**60
).map(lambda n: 2**64 - n)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, st.integers(0, 2**64 - 1)), min_size=8, max_size=8))
def test_the_margin_holds_for_float64(drawn: list[tuple[int, int]]) -> None:
    """What float64 makes of the words, against 200 digits at both ends of their cells."""
    k_P, a_P = (np.array(w, dtype=np.uint64) for w in zip(*drawn, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        r_P, margin_P = _radii(k_P, 1.0)
    t_P = torch.from_numpy(a_P.view(np.int64) * rounded._ANGLE)
    sides = [f(t_P).numpy() * r_P for f in (torch.cos, torch.sin)]
    for j, (k, a) in enumerate(drawn):
        for end in (Fraction(1, 10**6), 1 - Fraction(1, 10**6)):
            exact = pair((k + end) / 2**64, (a + end) / 2**64, 1.0)
            for side, value in zip(sides, exact, strict=True):
                assert margin_P[j] > 0
                assert abs(mpmath.mpf(side[j]) - value) <= mpmath.mpf(margin_P[j])


@given(st.lists(WORDS, min_size=8, max_size=8), st.floats(1.0, 2.0**40))
def test_the_margin_is_not_below_what_was_derived(drawn: list[int], ratio: float) -> None:
    with np.errstate(divide="ignore"):
        r_P, margin_P = _radii(np.array(drawn, dtype=np.uint64), ratio)
    for k, r, margin in zip(drawn, (r_P / ratio).tolist(), margin_P.tolist(), strict=True):
        e = 2.0**-53
        assert margin == math.inf if r == 0 else margin >= ratio * (36 * e * r + (2 * e + 2 / k) / r)


@pytest.mark.parametrize("name", ["log", "cos", "sin"])
def test_functions_err_by_less_than_four_units_of_the_last_place(name: str) -> None:
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, 2000) if name == "log" else random.uniform(-math.pi, math.pi, 2000)
    found = np.log(x) if name == "log" else getattr(torch, name)(torch.from_numpy(x)).numpy()
    with mpmath.workdps(50):
        errors = [
            abs(mpmath.mpf(y) - getattr(mpmath, name)(mpmath.mpf(v))) / math.ulp(y)
            for v, y in zip(x.tolist(), found.tolist(), strict=True)
        ]
    assert max(errors) < 4


def test_pairs_of_different_chunks_have_further_words_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "_CHUNK", 8)
    small_radius_words(1, monkeypatch)  # so that the further words alone make the radii
    z = rounded_gaussian(derived(), 128, 2.0**30).numpy() / 2.0**30
    assert len(np.unique(np.hypot(z[0::2], z[1::2]).round(6))) == 64


def test_the_exact_path_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(rounded, "_decide", lambda key, pair, *rest: asked.append(pair) or (0, 0))
    rounded_gaussian(derived(), 1 << 19, 2.0**26)
    assert len(asked) < 16  # about 1 expected
    rounded_gaussian(derived(), 1 << 14, 2.0**38)
    assert len(asked) > 16


# ---- what a draw may depend on --------------------------------------------------------------------------


def several_chunks() -> torch.Tensor:
    return rounded_gaussian(derived(), SEVERAL_CHUNKS, 2.0**30)


@pytest.mark.parametrize("threads", [2, 4])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    alone = several_chunks()
    torch.set_num_threads(threads)
    for _ in range(3):
        assert torch.equal(several_chunks(), alone)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(0, 3000) | st.integers(0, SEVERAL_CHUNKS))
def test_a_short_draw_is_the_beginning_of_a_long_one(size: int) -> None:
    assert torch.equal(rounded_gaussian(derived(), size, 2.0**30), several_chunks()[:size])


def test_chunks_labels_steps_and_keys_give_unrelated_values() -> None:
    key, later, other = NoiseKey(SECRET), NoiseKey(SECRET), NoiseKey(SECRET[::-1])
    later.advance()
    labels = ("secure/0/0/0", "secure/0/0/1", "secure/1/0/0")
    draws = torch.stack(
        [rounded_gaussian(k.derive(label), 4 * _CHUNK, 2.0**36) for k in (key, later, other) for label in labels]
    )
    rows = draws.view(-1, 2 * _CHUNK).numpy()
    assert len(np.unique(rows)) == rows.size
    for transform in (lambda v: v, np.abs):
        correlation = np.corrcoef(transform(rows)) - np.eye(len(rows))
        assert np.abs(correlation).max() < 5 / math.sqrt(2 * _CHUNK)


def test_values_are_whole_numbers() -> None:
    drawn = several_chunks()
    assert drawn.dtype == torch.float64 and torch.equal(drawn, drawn.round())
    assert bool(drawn.isfinite().all())
