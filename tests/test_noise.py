"""The noise: its law to the end of the tail, what it may depend on, and the secret behind it."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import pickle
from collections.abc import Callable, Iterator

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise import noise
from clipwise.errors import ConfigurationError, StepError
from clipwise.noise import NoiseKey, gaussian, normals_from_words

SECRET = bytes(range(1, 33))
TOP = 2**64 - 1
EXTREME = [0, 1, 2, 2**11, 2**32, 2**52 - 1, 2**52, 2**53 + 1, 2**62, 2**63 - 1, 2**63, TOP - 1, TOP]
word = st.sampled_from(EXTREME) | st.integers(0, TOP) | st.integers(0, 64).map(lambda bits: (1 << bits) - 1)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def derived(label: str = "noise/0") -> bytes:
    return NoiseKey(SECRET).derive(label)


def pair(k: int, a: int) -> tuple[float, float]:
    x, y = normals_from_words(np.array([k, a], dtype=np.uint64)).tolist()
    return x, y


def radii(words: np.ndarray) -> np.ndarray:
    """The radii that radius words give: with angle word 0 the first normal of a pair is the radius."""
    pairs = np.stack([words, np.zeros_like(words)], axis=1).reshape(-1)
    return normals_from_words(pairs)[::2].numpy()


def uniform_words(count: int, below: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, size=count, dtype=np.uint64, endpoint=False)


# ---- words -> normals -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(k=word, a=word)
def test_a_pair_is_box_muller_to_the_last_digits(k: int, a: int) -> None:
    x, y = pair(k, a)
    with mpmath.workdps(60):
        signed = a - 2**64 if a >= 2**63 else a
        square = -2 * mpmath.log((mpmath.mpf(k) + 0.5) / mpmath.mpf(2) ** 64)
        angle = mpmath.pi * signed / mpmath.mpf(2) ** 63
        radius = mpmath.sqrt(square)
        assert math.isfinite(x) and math.isfinite(y)
        # u has 53 bits: near u = 1 that is an absolute error of 2^-54 in ln u, elsewhere a relative one.
        assert abs(mpmath.mpf(x) ** 2 + mpmath.mpf(y) ** 2 - square) <= 2**-52 + 2**-49 * square
        slack = mpmath.sqrt(mpmath.mpf(2) ** -52 + 2**-49 * square) if square < 2**-40 else 2**-49 * radius
        assert abs(x - radius * mpmath.cos(angle)) <= slack
        assert abs(y - radius * mpmath.sin(angle)) <= slack


def test_the_smallest_words_keep_full_relative_precision() -> None:
    # A sampler that added anything to small uniforms, or cut them at 53 bits, would round these.
    small = np.arange(64, dtype=np.uint64)
    with mpmath.workdps(60):
        exact = [float(mpmath.sqrt(2 * (65 * mpmath.log(2) - mpmath.log(2 * int(k) + 1)))) for k in small]
    np.testing.assert_allclose(radii(small), exact, rtol=4e-16, atol=0)
    assert radii(small)[0] == pytest.approx(math.sqrt(2 * 65 * math.log(2)), rel=4e-16)
    assert radii(small)[0] > 9.49


@settings(deadline=None)
@given(words=st.lists(word, min_size=2, max_size=50))
def test_the_radius_falls_as_the_word_grows(words: list[int]) -> None:
    found = radii(np.array(sorted(words), dtype=np.uint64))
    assert (np.diff(found) <= 0).all()
    assert (found >= 0).all()


def test_every_extreme_pair_is_finite_and_the_largest_word_is_the_centre() -> None:
    words = np.array([(k, a) for k in EXTREME for a in EXTREME], dtype=np.uint64).reshape(-1)
    assert torch.isfinite(normals_from_words(words)).all()
    assert pair(TOP, 12345) == (0.0, 0.0)


def test_words_may_be_signed_unsigned_or_numpy() -> None:
    words = uniform_words(1000, TOP)
    signed = torch.from_numpy(words.view(np.int64))
    expected = normals_from_words(words)
    assert torch.equal(normals_from_words(signed), expected)
    assert torch.equal(normals_from_words(signed.view(torch.uint64)), expected)
    assert expected.dtype == torch.float64


@pytest.mark.parametrize(("shape", "dtype"), [(3, torch.int64), (4, torch.int32), ((2, 2), torch.int64)])
def test_other_words_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match="words"):
        normals_from_words(torch.zeros(shape, dtype=dtype))


# ---- the tail ---------------------------------------------------------------------------------------


def tail_p_value(radius: np.ndarray, bits: int) -> float:
    """KS test that radii from words below 2^(64 - bits) have the law of a normal pair's tail:
    P(r > x | r > r0) = exp(-(x^2 - r0^2) / 2) with exp(-r0^2 / 2) = 2^-bits."""
    excess = radius**2 / 2 - bits * math.log(2)
    return float(stats.kstest(excess, "expon").pvalue)


@pytest.mark.parametrize("bits", [0, 1, 20, 40])
def test_the_radius_has_the_exact_conditional_law_in_the_tail(bits: int) -> None:
    assert tail_p_value(radii(uniform_words(200_000, 2 ** (64 - bits))), bits) > 1e-3


def test_the_tail_test_rejects_24_bit_uniforms() -> None:
    # The planted fault: torch.randn's float32 uniforms are multiples of 2^-24, the first above 0.
    coarse = (uniform_words(200_000, 2**44) >> np.uint64(40) << np.uint64(40)) + np.uint64(2**40)
    assert radii(coarse).max() < 5.78
    assert tail_p_value(radii(coarse), 20) < 1e-12


def test_words_that_24_bits_cannot_express_reach_beyond_5_8_sigma() -> None:
    assert radii(np.array([2**40], dtype=np.uint64))[0] < 5.77
    assert radii(uniform_words(10_000, 2**39)).min() > 5.88


@pytest.mark.parametrize(("sigma", "bits"), [(3, 5), (6, 20), (7, 30), (8, 40), (9, 52)])
def test_one_coordinate_passes_sigma_as_often_as_a_normal_does(sigma: float, bits: int) -> None:
    # |x| > sigma needs r > sigma, so all of that event lies in the smallest 2^-bits of radius words.
    assert math.sqrt(2 * bits * math.log(2)) < sigma
    count = 400_000
    words = np.empty(2 * count, dtype=np.uint64)
    words[::2], words[1::2] = uniform_words(count, 2 ** (64 - bits)), uniform_words(count, TOP, seed=1)
    probability = 2 * stats.norm.sf(sigma) * 2.0**bits
    allowed = 5 * math.sqrt(count * probability)
    for coordinate in normals_from_words(words).view(-1, 2).unbind(1):
        assert abs(int((coordinate.abs() > sigma).sum()) - count * probability) < allowed


def test_float32_noise_keeps_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_cpu_words", lambda key, count: [torch.zeros(count, dtype=torch.int64)])
    assert gaussian(derived(), 2, 2.0)[0].item() == pytest.approx(2 * 9.4925, rel=1e-4)


# ---- the law of whole draws ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_normal(dtype: torch.dtype) -> None:
    count, std = 1 << 20, 3.0
    x = gaussian(derived("law"), count, std, dtype=dtype)
    assert x.dtype == dtype and x.shape == (count,)
    z = x.double().numpy() / std
    # mean, variance, skewness and kurtosis, each with the standard error of its moment
    for power, expected, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 4 * math.sqrt(error / count)
    assert stats.kstest(z, "norm").pvalue > 1e-3


def test_neighbours_in_a_draw_are_independent() -> None:
    z = gaussian(derived("law"), 1 << 19, 1.0, dtype=torch.float64).numpy()
    for lag in (1, 2, 3, 4):
        for transform in (lambda v: v, np.abs, np.square):  # a shared radius shows in the even ones
            for offset in (0, 1):
                a, b = transform(z[offset:-lag:2]), transform(z[offset + lag :: 2])
                m = min(len(a), len(b))
                assert abs(np.corrcoef(a[:m], b[:m])[0, 1]) < 5 / math.sqrt(m)


def test_float32_is_the_float64_draw_rounded() -> None:
    wide = gaussian(derived(), 5001, 1.7, dtype=torch.float64)
    assert torch.equal(gaussian(derived(), 5001, 1.7), wide.float())
    standard = gaussian(derived(), 5001, 1.0, dtype=torch.float64)
    torch.testing.assert_close(wide, 1.7 * standard, rtol=1e-15, atol=0)


def test_no_noise_is_zero() -> None:
    assert torch.equal(gaussian(derived(), 7, 0.0), torch.zeros(7))


# ---- what a draw may depend on ------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    size = 4 * noise._CPU_CHUNK + 1001
    alone = gaussian(derived(), size, 1.0, dtype=torch.float64)
    torch.set_num_threads(threads)
    assert torch.equal(gaussian(derived(), size, 1.0, dtype=torch.float64), alone)


@pytest.mark.parametrize("chunk", [4, 64, 1000, 4096])
def test_the_size_of_a_chunk_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gaussian(derived(), 10_001, 1.0, dtype=torch.float64)
    monkeypatch.setattr(noise, "_CPU_CHUNK", chunk)
    assert torch.equal(gaussian(derived(), 10_001, 1.0, dtype=torch.float64), whole)


@settings(deadline=None)
@given(size=st.integers(0, 3000))
def test_a_short_draw_is_the_beginning_of_a_long_one(size: int) -> None:
    assert torch.equal(gaussian(derived(), size, 1.0), gaussian(derived(), 3000, 1.0)[:size])


def test_chunks_are_one_philox_stream_and_use_every_byte_of_the_key() -> None:
    key = derived()
    whole = noise._philox(key, 0, 400)
    assert torch.equal(torch.cat([noise._philox(key, start, 80) for start in range(0, 400, 80)]), whole)
    for position in range(32):
        other = bytearray(key)
        other[position] ^= 1
        assert not torch.isin(noise._philox(bytes(other), 0, 400), whole).any()


def test_neither_torch_nor_numpy_seeds_matter() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    first = gaussian(derived(), 100, 1.0)
    torch_state = torch.get_rng_state()
    assert torch.equal(gaussian(derived(), 100, 1.0), first)
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_labels_steps_and_keys_give_unrelated_streams() -> None:
    key, later, other = NoiseKey(SECRET), NoiseKey(SECRET), NoiseKey(SECRET[::-1])
    later.advance()
    subkeys = [k.derive(label) for k in (key, later, other) for label in ("noise/0", "noise/1", "sampling")]
    count = 1 << 16
    draws = np.stack([gaussian(k, count, 1.0, dtype=torch.float64).numpy() for k in subkeys])
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 5 / math.sqrt(count)
    assert len(np.unique(draws)) == draws.size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_noise_below_float32_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match="dtype"):
        gaussian(derived(), 4, 1.0, dtype=dtype)


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_a_standard_deviation_that_is_none_is_refused(std: float) -> None:
    with pytest.raises(ConfigurationError, match="std"):
        gaussian(derived(), 4, std)


def test_a_wrong_key_or_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="key"):
        gaussian(b"short", 4, 1.0)
    with pytest.raises(ConfigurationError, match="size"):
        gaussian(derived(), -1, 1.0)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_the_draw_arrives_on_the_device(device: torch.device | str) -> None:
    assert gaussian(derived(), 3, 1.0, device=device).device == torch.device(device)


# ---- the secret -----------------------------------------------------------------------------------------


def test_fresh_keys_differ() -> None:
    assert len({NoiseKey.fresh().secret_bytes() for _ in range(100)}) == 100


def test_the_construction_is_the_stated_one() -> None:
    # A resume file is worthless when this changes.
    def blake(person: bytes, data: bytes, key: bytes = b"") -> bytes:
        return hashlib.blake2b(data, digest_size=32, key=key, person=person).digest()

    key = NoiseKey(SECRET)
    assert key.derive("noise/3") == blake(b"clipwise.derive", b"noise/3", SECRET)
    key.advance()
    assert key.secret_bytes() == blake(b"clipwise.advance", b"", SECRET)
    assert NoiseKey.from_seed(7, b"run").secret_bytes() == blake(b"clipwise.seed", b"7:run")


def test_advance_overwrites_the_old_secret_in_place() -> None:
    key, ahead = NoiseKey(SECRET), NoiseKey(SECRET).copy()
    memory, sub = key._secret, key.derive("noise/0")
    key.advance()
    assert key._secret is memory
    assert not any(SECRET[i : i + 4] in bytes(memory) for i in range(29))
    assert key.derive("noise/0") != sub
    ahead.advance()
    assert ahead.secret_bytes() == key.secret_bytes()


def test_no_step_or_label_ever_repeats() -> None:
    key, seen = NoiseKey(SECRET), set()
    for _ in range(50):
        seen |= {key.secret_bytes(), *(key.derive(label) for label in ("", "a", "b", "noise/1", "noise/11"))}
        key.advance()
    assert len(seen) == 50 * 6
    assert {len(s) for s in seen} == {32}


def test_a_copy_is_independent() -> None:
    key = NoiseKey(SECRET)
    other = key.copy()
    other.advance()
    assert key.secret_bytes() == SECRET
    other.wipe()
    assert key.secret_bytes() == SECRET


@given(a=st.tuples(st.integers(), st.binary(max_size=20)), b=st.tuples(st.integers(), st.binary(max_size=20)))
def test_seed_and_context_both_decide_the_key(a: tuple[int, bytes], b: tuple[int, bytes]) -> None:
    same = NoiseKey.from_seed(*a).secret_bytes() == NoiseKey.from_seed(*b).secret_bytes()
    assert same == (a == b)


def test_seed_and_context_do_not_run_into_each_other() -> None:
    assert NoiseKey.from_seed(1, b"2").secret_bytes() != NoiseKey.from_seed(12, b"").secret_bytes()
    assert NoiseKey.from_seed(1, b"2:3").secret_bytes() != NoiseKey.from_seed(12, b"3").secret_bytes()


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
def test_a_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    with pytest.raises(ConfigurationError, match="seed"):
        NoiseKey.from_seed(seed, b"")  # type: ignore[arg-type]


def test_the_secret_survives_its_resume_file() -> None:
    key = NoiseKey.fresh()
    key.advance()
    again = NoiseKey.from_secret_bytes(key.secret_bytes())
    assert again.derive("noise/0") == key.derive("noise/0")


@pytest.mark.parametrize("secret", [b"", SECRET[:31], SECRET + b"x", bytes(32), "a" * 32])
def test_a_secret_that_is_none_is_refused(secret: object) -> None:
    with pytest.raises(ConfigurationError, match="secret"):
        NoiseKey.from_secret_bytes(secret)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_key_cannot_be_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="NoiseKey"):
        pickle.dumps({"state": [NoiseKey(SECRET)]}, protocol)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_a_key_cannot_be_copied_unawares(copier: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="NoiseKey"):
        copier(NoiseKey(SECRET))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_key_cannot_be_saved_by_torch(zipped: bool) -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError, match="NoiseKey"):
        torch.save({"key": NoiseKey(SECRET)}, file, _use_new_zipfile_serialization=zipped)
    assert SECRET not in file.getvalue()


def test_a_key_does_not_show_itself() -> None:
    key = NoiseKey(SECRET)
    for text in (repr(key), str(key), f"{key}", repr([key])):
        assert "secret" in text
        assert SECRET.hex() not in text and repr(SECRET)[2:20] not in text
    assert not hasattr(key, "__dict__")


def test_a_wiped_key_holds_nothing_and_refuses_to_work() -> None:
    key = NoiseKey(SECRET)
    memory = key._secret
    key.wipe()
    assert bytes(memory) == bytes(32)
    for use in (key.advance, key.copy, key.secret_bytes, lambda: key.derive("noise/0")):
        with pytest.raises(StepError, match="wiped"):
            use()


# ---- CUDA -----------------------------------------------------------------------------------------------


@needs_cuda
def test_cuda_words_use_all_64_bits_and_most_of_the_key() -> None:
    key, device = derived(), torch.device("cuda")
    (words,) = noise._cuda_words(key, 1 << 20, device)
    for bit in range(64):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - (1 << 19)) < 5 * math.sqrt(1 << 18)
    for position in range(16):
        other = bytearray(key)
        other[position] ^= 128
        (changed,) = noise._cuda_words(bytes(other), 1 << 16, device)
        assert not torch.isin(changed, words).any()


@needs_cuda
def test_cuda_draws_are_normal_and_repeatable() -> None:
    size = noise._CUDA_CHUNK + 12_345
    x = gaussian(derived(), size, 2.0, device="cuda", dtype=torch.float64)
    assert torch.equal(gaussian(derived(), size, 2.0, device="cuda", dtype=torch.float64), x)
    assert x.shape == (size,) and len(torch.unique(x)) == size
    z = x.cpu().numpy() / 2.0
    for power, expected, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 4 * math.sqrt(error / size)
    assert stats.kstest(z[: 1 << 20], "norm").pvalue > 1e-3


@needs_cuda
def test_cuda_and_cpu_make_the_same_normals_of_the_same_words() -> None:
    bits = np.concatenate([np.array(EXTREME, dtype=np.uint64), uniform_words(100_000, TOP)])
    words = torch.from_numpy(bits.view(np.int64))
    torch.testing.assert_close(
        normals_from_words(words.cuda()).cpu(), normals_from_words(words), rtol=1e-14, atol=1e-14
    )
