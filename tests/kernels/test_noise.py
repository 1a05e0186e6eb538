"""Normals from a counter: correct words, correct formula up to the tail, correct distribution."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise.kernels import noise
from tests.kernels.ways import both

WAYS = both(noise.normals_in_torch, noise.normals)
KEY = torch.tensor([-0x123456789ABCDEF, 0x7EDCBA9876543210, 3, 4])
LAST = 2**32 - 1
TOP = 2**64 - 1
EXTREME = [0, 1, 2, 2**11, 2**32, 2**52 - 1, 2**52, 2**53 + 1, 2**62, 2**63 - 1, 2**63, TOP - 1, TOP]
word = st.sampled_from(EXTREME) | st.integers(0, TOP) | st.integers(0, 64).map(lambda bits: (1 << bits) - 1)


# Words


def words_of(counter, key):
    counter = tuple(torch.tensor([c]) for c in counter)
    return [int(w) for w in noise.philox(counter, (torch.tensor(key[0]), torch.tensor(key[1])))]


def test_philox_known_answers():
    assert words_of([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words_of([LAST] * 4, [LAST] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("way", WAYS)
def test_pairs_are_functions_of_their_counter_words(way):
    """Counter (j, secret), key (secret): the words, and then Box-Muller."""
    secret = [int(x) % 2**64 for x in KEY[:2]]
    words = [
        words_of([j, 0, secret[1] & LAST, secret[1] >> 32], [secret[0] & LAST, secret[0] >> 32]) for j in range(50)
    ]
    k, a = ([w[i] | w[i + 1] << 32 for w in words] for i in (0, 2))
    found = way(KEY, 100, 1.7, torch.float64)
    assert torch.allclose(found.view(-1, 2), 1.7 * pairs(k, a), rtol=1e-14, atol=1e-15)


# From words to normals


def signed(words) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


def pairs(k, a) -> torch.Tensor:
    """Standard normals from words below 2^64, [P, 2]."""
    return noise.pairs_from_words(signed(k), signed(a), 1.0)


def radii(k) -> np.ndarray:
    """With angle word 0 the first normal of a pair is its radius."""
    return pairs(k, np.zeros(len(k)))[:, 0].numpy()


def uniform_words(count: int, below: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, size=count, dtype=np.uint64, endpoint=False)


@settings(deadline=None, max_examples=400)
@given(k=word, a=word)
def test_a_pair_is_box_muller_up_to_rounding(k, a):
    ((x, y),) = pairs([k], [a]).tolist()
    with mpmath.workdps(60):
        turn = a - 2**64 if a >= 2**63 else a
        square = -2 * mpmath.log((mpmath.mpf(k) + 0.5) / mpmath.mpf(2) ** 64)
        angle = mpmath.pi * turn / mpmath.mpf(2) ** 63
        radius = mpmath.sqrt(square)
        assert math.isfinite(x) and math.isfinite(y)
        # u has 53 bits: near u = 1 that is an absolute error of 2^-54 in ln u, elsewhere a relative one.
        assert abs(mpmath.mpf(x) ** 2 + mpmath.mpf(y) ** 2 - square) <= 2**-52 + 2**-49 * square
        slack = mpmath.sqrt(mpmath.mpf(2) ** -52 + 2**-49 * square) if square < 2**-40 else 2**-49 * radius
        assert abs(x - radius * mpmath.cos(angle)) <= slack
        assert abs(y - radius * mpmath.sin(angle)) <= slack


def test_the_smallest_words_keep_full_relative_precision():
    # A sampler that added anything to small uniforms, or truncated them to 53 bits, would round these.
    small = np.arange(64, dtype=np.uint64)
    with mpmath.workdps(60):
        exact = [float(mpmath.sqrt(2 * (65 * mpmath.log(2) - mpmath.log(2 * int(k) + 1)))) for k in small]
    np.testing.assert_allclose(radii(small), exact, rtol=4e-16, atol=0)
    assert radii(small)[0] == pytest.approx(math.sqrt(2 * 65 * math.log(2)), rel=4e-16)
    assert radii(small)[0] > 9.49


@settings(deadline=None)
@given(words=st.lists(word, min_size=2, max_size=50))
def test_the_radius_falls_as_the_word_grows(words):
    found = radii(sorted(words))
    assert (np.diff(found) <= 0).all()
    assert (found >= 0).all()


def test_extreme_pairs_are_finite_and_the_largest_word_gives_0():
    k, a = zip(*[(k, a) for k in EXTREME for a in EXTREME], strict=True)
    assert torch.isfinite(pairs(k, a)).all()
    assert pairs([TOP], [12345]).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("std", [0.0, 0.3, 1e30])
def test_the_radius_scales_with_std(std):
    k, a = (signed(uniform_words(1000, TOP, seed)) for seed in (0, 1))
    scaled, standard = noise.pairs_from_words(k, a, std), noise.pairs_from_words(k, a, 1.0)
    torch.testing.assert_close(scaled, std * standard, rtol=1e-15, atol=0)


# The tail


def tail_p_value(radius: np.ndarray, bits: int) -> float:
    """KS test that radii from words below 2^(64 - bits) have the law of a normal pair's tail:
    P(r > x | r > r0) = exp(-(x^2 - r0^2) / 2) with exp(-r0^2 / 2) = 2^-bits."""
    excess = radius**2 / 2 - bits * math.log(2)
    return float(stats.kstest(excess, "expon").pvalue)


@pytest.mark.parametrize("bits", [0, 1, 20, 40])
def test_the_radius_has_the_exact_conditional_law_in_the_tail(bits):
    assert tail_p_value(radii(uniform_words(200_000, 2 ** (64 - bits))), bits) > 1e-3


def test_the_tail_test_rejects_24_bit_uniforms():
    # A deliberate fault: torch.randn's float32 uniforms are multiples of 2^-24, the first above 0.
    coarse = (uniform_words(200_000, 2**44) >> np.uint64(40) << np.uint64(40)) + np.uint64(2**40)
    assert radii(coarse).max() < 5.78
    assert tail_p_value(radii(coarse), 20) < 1e-12


def test_words_that_24_bits_cannot_express_reach_beyond_5_8_sigma():
    assert radii([2**40])[0] < 5.77
    assert radii(uniform_words(10_000, 2**39)).min() > 5.88


@pytest.mark.parametrize(("sigma", "bits"), [(3, 5), (6, 20), (7, 30), (8, 40), (9, 52)])
def test_one_coordinate_exceeds_sigma_as_often_as_a_normal(sigma, bits):
    # |x| > sigma needs r > sigma, so all of that event lies in the smallest 2^-bits of radius words.
    assert math.sqrt(2 * bits * math.log(2)) < sigma
    count = 400_000
    found = pairs(uniform_words(count, 2 ** (64 - bits)), uniform_words(count, TOP, seed=1))
    probability = 2 * stats.norm.sf(sigma) * 2.0**bits
    allowed = 5 * math.sqrt(count * probability)
    for coordinate in found.unbind(1):
        assert abs(int((coordinate.abs() > sigma).sum()) - count * probability) < allowed


# Whole draws


@pytest.mark.parametrize("way", WAYS)
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(way):
    long = way(KEY, 3001, 0.1, torch.float32)
    for size in (0, 1, 2, 1023, 1024, 1025):
        assert torch.equal(way(KEY, size, 0.1, torch.float32), long[:size])


def test_the_pieces_of_the_twin_are_one_draw(monkeypatch):
    whole = noise.normals_in_torch(KEY, 1001, 1.0, torch.float64)
    monkeypatch.setattr(noise, "_TWIN_PAIRS", 64)
    assert torch.equal(noise.normals_in_torch(KEY, 1001, 1.0, torch.float64), whole)


@pytest.mark.parametrize("way", WAYS)
def test_float32_is_float64_rounded_once(way):
    exact = way(KEY, 2000, math.pi, torch.float64)
    assert torch.equal(way(KEY, 2000, math.pi, torch.float32), exact.float())


@pytest.mark.parametrize("way", WAYS)
def test_the_draw_depends_on_every_secret_bit_and_nothing_else(way):
    drawn = way(KEY, 20, 1.0, torch.float64)
    for number, bit in [(0, 0), (0, 40), (0, 63), (1, 0), (1, 40), (1, 63)]:
        other = KEY.clone()
        other[number] ^= 1 << bit if bit < 63 else -(2**63)
        assert (way(other, 20, 1.0, torch.float64) != drawn).all()
    assert torch.equal(way(KEY, 20, 1.0, torch.float64), drawn)


@pytest.mark.parametrize("way", WAYS)
def test_moments(way):
    """Within five standard errors: the first four moments, and the correlation within pairs."""
    n = 100_000
    x = way(KEY, n, 2.0, torch.float64) / 2
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(x.pow(power).mean() - mean) < 5 * math.sqrt(variance / n)
    assert abs((x[::2] * x[1::2]).mean()) < 5 / math.sqrt(n / 2)
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-3


def test_the_kernel_equals_the_twin_in_every_octant():
    size = 1 << 14
    found = noise.normals(KEY, size, 1.0, torch.float64).view(-1, 2)
    twin = noise.normals_in_torch(KEY, size, 1.0, torch.float64).view(-1, 2)
    eighths = torch.atan2(twin[:, 1], twin[:, 0]).div(math.pi / 4).floor().long()
    assert eighths.unique().tolist() == list(range(-4, 4))
    torch.testing.assert_close(found, twin, rtol=4e-15, atol=4e-15)  # the twin rounds the angle


@pytest.mark.parametrize("way", WAYS)
def test_a_std_of_0(way):
    assert not way(KEY, 100, 0.0, torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 1023, 2049])
def test_fused_noise_equals_noise_added_and_divided(size, dtype):
    sums = torch.randn(size, dtype=dtype)
    before = sums.clone()
    expected = (noise.normals(KEY, size, 0.7, dtype) + sums) / 7.3
    found = noise.normals(KEY, size, 0.7, dtype, None, sums, 7.3)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert found.shape == (size,) and torch.equal(sums, before)
