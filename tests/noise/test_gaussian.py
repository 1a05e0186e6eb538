"""The noise: its law to the end of the tail, what it may depend on, and the secret behind it.

That of CUDA is tested in tests/kernels/test_noise.py, from its words on.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise.errors import ConfigurationError, StepError
from clipwise.noise import gaussian as noise
from clipwise.noise.gaussian import gaussian, key_words
from clipwise.noise.key import NoiseKey
from tests.noise.test_standard_normal import TAIL, Fed, tail_p_value, tail_words

SECRET = bytes(range(1, 33))
TOP = 2**64 - 1

pytestmark = pytest.mark.usefixtures("one_thread")


def derived(label: str = "noise/0") -> bytes:
    return NoiseKey(SECRET).derive(label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_keeps_the_tail(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Fed(np.full(1000, TOP, np.uint64)), Fed(tail_words(2000, stats.norm.sf(9.0) / TAIL))
    monkeypatch.setattr(noise._Streams, "of", lambda self, chunk: words)
    x = gaussian(derived(), 1000, 2.0, dtype=dtype).double().numpy() / 2.0
    assert tail_p_value(x, 9.0) > 1e-3


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


SEVERAL_CHUNKS = 4 * noise._CPU_CHUNK + 1001


def several_chunks() -> torch.Tensor:
    return gaussian(derived(), SEVERAL_CHUNKS, 1.0, dtype=torch.float64)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    alone = several_chunks()
    torch.set_num_threads(threads)
    for _ in range(5):
        assert torch.equal(several_chunks(), alone)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 40), st.floats(0.01, 100.0)), min_size=1, max_size=6),
    chunk=st.integers(1, 30),
)
def test_pieces_are_those_of_one_draw_each_with_its_std(pieces: list[tuple[int, float]], chunk: int) -> None:
    sizes, stds = map(list, zip(*pieces, strict=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(noise, "_CPU_CHUNK", chunk)
        found = noise.gaussian_in_pieces(derived(), sizes, stds).split(sizes)
        ends = itertools.accumulate(sizes)
        for piece, size, end, std in zip(found, sizes, ends, stds, strict=True):
            assert torch.equal(piece, gaussian(derived(), sum(sizes), std)[end - size : end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_added_in_place_is_that_of_a_draw(dtype: torch.dtype) -> None:
    sizes, stds, divisor = [0, 3, noise._CPU_CHUNK, 2 * noise._CPU_CHUNK + 5], [1.0, 0.5, 2.0, 3.0], 7.3
    sums = [torch.randn(size, dtype=dtype) for size in sizes]
    drawn = gaussian(derived(), sum(sizes), 1.0, dtype=torch.float64).split(sizes)
    noises = [(std * z).to(dtype) for std, z in zip(stds, drawn, strict=True)]
    expected = [(total + z) / divisor for total, z in zip(sums, noises, strict=True)]
    noise.add_gaussian(derived(), sums, stds, divisor)
    assert all(torch.equal(found, other) for found, other in zip(sums, expected, strict=True))


def test_noise_is_added_in_the_order_of_memory() -> None:
    first, second = torch.zeros(8, 5), torch.zeros(5, 8).t()
    for total in (first, second):
        noise.add_gaussian(derived(), [total], [1.0], 1.0)
    assert torch.equal(first.view(-1), second.t().reshape(-1))
    assert torch.equal(first.view(-1), gaussian(derived(), 40, 1.0))


def test_callers_may_draw_at_the_same_time() -> None:
    alone = several_chunks()
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: several_chunks(), range(8)):
            assert torch.equal(found, alone)


def test_a_draw_of_one_chunk_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    pool = noise._pool
    monkeypatch.setattr(noise, "_pool", lambda process, threads: asked.append(threads) or pool(process, threads))
    torch.set_num_threads(4)
    gaussian(derived(), noise._CPU_CHUNK, 1.0)
    assert asked == []
    gaussian(derived(), noise._CPU_CHUNK + 1, 1.0)
    assert asked == [4]


def test_a_fork_draws_with_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    expected = several_chunks().numpy().tobytes()  # the parent's threads are there now

    def child() -> None:
        os._exit(0 if several_chunks().numpy().tobytes() == expected else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


@settings(deadline=None)
@given(size=st.integers(0, 3000) | st.integers(0, SEVERAL_CHUNKS))
def test_a_short_draw_is_the_beginning_of_a_long_one(size: int) -> None:
    short, long = gaussian(derived(), size, 1.0, dtype=torch.float64), several_chunks()
    assert torch.equal(short, long[:size])


def test_chunks_are_independent() -> None:
    chunks = 32
    z = gaussian(derived("chunks"), chunks * noise._CPU_CHUNK, 1.0, dtype=torch.float64).numpy()
    assert len(np.unique(z)) == len(z)
    rows = z.reshape(chunks, noise._CPU_CHUNK)
    for transform in (lambda v: v, np.abs):
        correlation = np.corrcoef(transform(rows)) - np.eye(chunks)
        assert np.abs(correlation).max() < 5 / math.sqrt(noise._CPU_CHUNK)


def words_of(key: bytes, chunk: int) -> np.ndarray:
    return np.concatenate([stream.random_raw(400) for stream in noise._Streams(key).of(chunk)])


def test_a_generator_that_was_moved_gives_the_words_of_a_new_one() -> None:
    streams = noise._Streams(derived())
    for chunk in (3, 0, 2**40):
        for used, new in zip(streams.of(chunk), noise._Streams(derived()).of(chunk), strict=True):
            # The odd number of words leaves some in the generator's buffer.
            assert np.array_equal(used.random_raw(403), new.random_raw(403))


def test_no_two_chunks_share_a_word_and_every_byte_of_the_key_counts() -> None:
    key = derived()
    first = words_of(key, 0)
    assert len(np.unique(first)) == len(first)
    for chunk in (1, 2, 255, 256, 2**32, 2**63):
        assert not np.isin(words_of(key, chunk), first).any()
    for position in range(32):
        other = bytearray(key)
        other[position] ^= 1
        assert not np.isin(words_of(bytes(other), 0), first).any()


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


def test_a_device_reads_all_of_a_key_in_order() -> None:
    key = derived()
    assert key_words(key).dtype == torch.int64
    assert key_words(key).numpy().tobytes() == key


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
    assert NoiseKey.from_seed(7).secret_bytes() == blake(b"clipwise.seed", b"7:")
    name = hashlib.blake2b(digest_size=16, key=SECRET, person=b"clipwise.key-id").hexdigest()
    assert NoiseKey(SECRET).id == key.id == key.copy().id == name  # the same at every step
    assert NoiseKey(key.secret_bytes(), key.id).id == name


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


@pytest.mark.parametrize("use", ["derive", "advance", "secret_bytes", "copy"])
def test_a_forked_key_refuses(use: str) -> None:
    """Parent and child would have the same noise."""
    key = NoiseKey(SECRET)

    def child() -> None:
        try:
            getattr(key, use)(*(["noise/0"] if use == "derive" else []))
        except StepError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert key.secret_bytes() == SECRET  # and here it works


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
    again = NoiseKey(key.secret_bytes())
    assert again.derive("noise/0") == key.derive("noise/0")


@pytest.mark.parametrize("secret", [b"", SECRET[:31], SECRET + b"x", bytes(32), "a" * 32])
def test_a_secret_that_is_none_is_refused(secret: object) -> None:
    with pytest.raises(ConfigurationError, match="secret"):
        NoiseKey(secret)  # type: ignore[arg-type]


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
