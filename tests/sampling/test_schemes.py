"""The law of every scheme's draws, its public numbers and its events."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipwise.errors import ConfigurationError, StepError
from clipwise.privacy import SUPPORTED, Adjacency, Event, Sampling, Unit
from clipwise.sampling import schemes
from clipwise.sampling.base import Scheme
from clipwise.sampling.schemes import FixedSize, Full, Partition, Poisson, Shuffled, TruncatedPoisson, make_scheme

ALL = [
    Poisson(50, 0.1),
    TruncatedPoisson(50, 0.1, 9),
    FixedSize(50, 7),
    FixedSize(50, 6, microbatches=3),
    Partition(50, 7),
    Partition(50, 6, microbatches=3),
    Shuffled(50, 7),
    Full(50),
]
EPOCH = sha256(b"epoch").digest()
ACCEPT = 1e-3  # the secrets are fixed, so a test that passes once always passes


def secret(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def draws(scheme: Scheme, count: int, name: str = "step") -> list[np.ndarray]:
    return [scheme.draw(secret((name, t)), EPOCH, 0) for t in range(count)]


def chi_square(observed: list[int], expected: list[float]) -> float:
    return float(stats.chisquare(observed, expected).pvalue)


# -- properties of every scheme


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: str(s.sampling))
def test_a_draw_is_a_pure_function_with_sorted_distinct_indices(scheme: Scheme) -> None:
    for t in range(20):
        first = scheme.draw(secret(t), EPOCH, t % scheme.steps_per_epoch)
        np.random.default_rng(0).random(5)
        again = scheme.draw(secret(t), EPOCH, t % scheme.steps_per_epoch)
        assert first.dtype == np.int64
        assert np.array_equal(first, again)
        assert np.all(np.diff(first) > 0)
        assert len(first) == 0 or (first[0] >= 0 and first[-1] < scheme.dataset_size)


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: str(s.sampling))
def test_a_caller_may_write_into_a_draw_without_changing_the_next(scheme: Scheme) -> None:
    first = scheme.draw(secret(1), EPOCH, 0)
    kept = first.copy()
    first[:] = -1
    assert np.array_equal(scheme.draw(secret(1), EPOCH, 0), kept)


@pytest.mark.parametrize(
    ("scheme", "rate", "steps", "size", "period"),
    [
        (Poisson(60000, 256 / 60000), 256 / 60000, 235, 256.0, 1),
        (Poisson(10, 1.0), 1.0, 1, 10.0, 1),
        (Poisson(10, 0.3), 0.3, 4, 3.0, 1),
        (FixedSize(10, 4), 0.4, 3, 4.0, 1),
        (FixedSize(11, 4, microbatches=2), 2 / 5, 3, 4.0, 1),
        (FixedSize(12, 6, microbatches=3), 0.5, 2, 6.0, 1),
        (TruncatedPoisson(10, 0.3, 5), 0.3, 4, 3.0, 1),
        (Partition(10, 4), 1 / 3, 3, 10 / 3, 1),
        (Partition(10, 4, microbatches=2), 2 / 5, 3, 4.0, 1),
        (Partition(12, 10, microbatches=2), 2 / 3, 2, 8.0, 1),
        (Shuffled(10, 4), 1 / 3, 3, 10 / 3, 3),
        (Shuffled(12, 4), 1 / 3, 3, 4.0, 3),
        (Full(10), 1.0, 1, 10.0, 1),
    ],
)
def test_public_numbers(scheme: Scheme, rate: float, steps: int, size: float, period: int) -> None:
    assert scheme.sample_rate == rate
    assert scheme.steps_per_epoch == steps
    assert scheme.expected_size == pytest.approx(size, rel=1e-14)
    assert scheme.period == period


@given(st.integers(1, 10**6), st.data())
def test_poisson_epoch_is_not_one_step_longer_through_rounding(size: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, size))
    assert make_scheme("poisson", size, batch_size=batch).steps_per_epoch == math.ceil(size / batch)


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: str(s.sampling))
def test_event_carries_what_the_scheme_does(scheme: Scheme) -> None:
    event = scheme.event(1.5)
    assert event == Event(
        sampling=scheme.sampling,
        adjacency=SUPPORTED[scheme.sampling][0],
        unit=Unit.RECORD,
        noise_multiplier=1.5,
        sample_rate=scheme.sample_rate,
        period=8 if scheme.sampling is Sampling.SHUFFLED else 1,
        excess=scheme.excess,
    )
    assert (event.excess > 0) == (scheme.sampling is Sampling.TRUNCATED_POISSON)
    for adjacency in Adjacency:
        if adjacency in SUPPORTED[scheme.sampling]:
            event = scheme.event(0.0, adjacency, Unit.USER)
            assert (event.adjacency, event.unit, event.noise_multiplier) == (adjacency, Unit.USER, 0.0)
        else:
            with pytest.raises(ConfigurationError, match="adjacency"):
                scheme.event(1.0, adjacency)


# -- Poisson


@pytest.mark.slow
def test_poisson_is_the_law_of_independent_inclusions() -> None:
    """All 2^N subsets of a small data set, against q^|A| (1-q)^(N-|A|)."""
    size, rate, count = 5, 0.3, 20_000
    seen = Counter(tuple(d.tolist()) for d in draws(Poisson(size, rate), count))
    subsets = [s for k in range(size + 1) for s in itertools.combinations(range(size), k)]
    expected = [count * rate ** len(s) * (1 - rate) ** (size - len(s)) for s in subsets]
    assert chi_square([seen[s] for s in subsets], expected) > ACCEPT
    assert seen[()] > 0, "an empty draw stays empty"


@pytest.mark.parametrize("rate", [0.0005, 0.3])  # numpy has another way of choosing for each
def test_poisson_sizes_and_inclusions_in_a_large_data_set(rate: float) -> None:
    size, count = 20_000, 1000 if rate < 0.01 else 200
    drawn = draws(Poisson(size, rate), count)
    sizes = np.array([len(d) for d in drawn])
    mean, variance = size * rate, size * rate * (1 - rate)
    assert abs(sizes.mean() - mean) < 4 * math.sqrt(variance / count)
    # The variance of a sample variance is about 2 variance^2 / count.
    assert abs(sizes.var(ddof=1) - variance) < 4 * variance * math.sqrt(2 / count)
    hits = np.bincount(np.concatenate(drawn), minlength=size).reshape(100, -1).sum(axis=1)
    assert chi_square(hits.tolist(), [sizes.sum() / 100] * 100) > ACCEPT


def test_poisson_sizes_are_binomial() -> None:
    size, rate, count = 200, 0.02, 10_000
    seen = np.bincount([len(d) for d in draws(Poisson(size, rate), count)], minlength=12)
    observed = [*seen[:11].tolist(), int(seen[11:].sum())]
    law = stats.binom(size, rate)
    expected = [count * law.pmf(k) for k in range(11)] + [count * law.sf(10)]
    assert chi_square(observed, expected) > ACCEPT


@pytest.mark.slow
def test_poisson_steps_are_independent() -> None:
    """The pair of consecutive draws falls into an 8 x 8 table of subsets without association."""
    drawn = [sum(2**i for i in d.tolist()) for d in draws(Poisson(3, 0.4), 20_000, name="pairs")]
    table = np.zeros((8, 8))
    np.add.at(table, (drawn[0::2], drawn[1::2]), 1)
    assert stats.chi2_contingency(table).pvalue > ACCEPT


def test_poisson_work_does_not_grow_with_the_data_set() -> None:
    """An array of this many indices would be 8 TB."""
    drawn = Poisson(10**12, 1e-11).draw(secret("huge"), EPOCH, 0)
    assert len(drawn) < 100


# -- fixed size


def test_fixed_size_is_uniform_over_subsets() -> None:
    drawn = draws(FixedSize(6, 3), 10_000)
    assert all(len(set(d.tolist())) == 3 for d in drawn)
    seen = Counter(tuple(d.tolist()) for d in drawn)
    subsets = list(itertools.combinations(range(6), 3))
    assert chi_square([seen[s] for s in subsets], [10_000 / len(subsets)] * len(subsets)) > ACCEPT


@pytest.mark.parametrize("batch_size", [50, 15_000, 20_000])
def test_fixed_size_has_no_repetition_in_a_large_data_set(batch_size: int) -> None:
    drawn = FixedSize(20_000, batch_size).draw(secret("large"), EPOCH, 0)
    assert len(np.unique(drawn)) == len(drawn) == batch_size


# -- truncated Poisson


@pytest.mark.slow
def test_truncated_poisson_is_the_law_of_a_cut_poisson_draw() -> None:
    """All subsets up to the limit: q^k (1-q)^(N-k), and at the limit the rest of the mass, shared equally."""
    size, rate, limit, count = 5, 0.4, 3, 20_000
    seen = Counter(tuple(d.tolist()) for d in draws(TruncatedPoisson(size, rate, limit), count))
    subsets = [s for k in range(limit + 1) for s in itertools.combinations(range(size), k)]
    assert set(seen) <= set(subsets)
    law = stats.binom(size, rate)
    shares = [law.pmf(k) / math.comb(size, k) for k in range(limit)] + [law.sf(limit - 1) / math.comb(size, limit)]
    assert chi_square([seen[s] for s in subsets], [count * shares[len(s)] for s in subsets]) > ACCEPT


def test_truncated_poisson_draws_like_poisson_below_the_limit() -> None:
    plain, cut = Poisson(1000, 0.05), make_scheme("truncated-poisson", 1000, 50)
    for one, other in zip(draws(plain, 50), draws(cut, 50), strict=True):
        assert np.array_equal(one, other)


def test_the_default_limit_costs_nothing_and_a_limit_below_the_mean_is_refused() -> None:
    scheme = make_scheme("truncated-poisson", 60000, 256)
    assert isinstance(scheme, TruncatedPoisson)
    assert 256 + 8 * 16 < scheme.max_batch_size < 256 + 12 * 16
    assert 0 < scheme.excess < 1e-18
    assert make_scheme("truncated-poisson", 60000, 256, max_batch_size=60000).excess == 0
    assert make_scheme("truncated-poisson", 60, sample_rate=1e-300).largest_size == 1  # no batch is expected
    with pytest.raises(ConfigurationError, match=f"max_batch_size=255.*give {scheme.max_batch_size}"):
        make_scheme("truncated-poisson", 60000, 256, max_batch_size=255)


# -- partition


@given(st.integers(1, 60), st.data())
def test_partition_blocks_are_fixed_disjoint_and_consecutive(size: int, data: st.DataObject) -> None:
    scheme = Partition(size, data.draw(st.integers(1, size)))
    expected = {tuple(range(a, min(a + scheme.batch_size, size))) for a in range(0, size, scheme.batch_size)}
    assert len(expected) == scheme.blocks
    seen = {tuple(d.tolist()) for d in draws(scheme, 5)}
    assert seen <= expected


def test_partition_chooses_each_block_with_equal_probability() -> None:
    scheme = Partition(10, 3)  # the short block as often as the others
    seen = Counter(int(d[0]) for d in draws(scheme, 8000))
    assert set(seen) == {0, 3, 6, 9}
    assert chi_square(list(seen.values()), [2000.0] * 4) > ACCEPT


def test_partition_of_several_microbatches_is_uniform_over_choices_of_blocks() -> None:
    scheme = Partition(11, 6, microbatches=3)  # blocks of 2, the last of 1
    seen = Counter(tuple(d.tolist()) for d in draws(scheme, 8000))
    blocks = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10,)]
    choices = [tuple(itertools.chain(*chosen)) for chosen in itertools.combinations(blocks, 3)]
    assert set(seen) == set(choices)
    assert chi_square([seen[c] for c in choices], [8000 / 20] * 20) > ACCEPT


def test_fixed_size_of_several_microbatches_is_uniform_over_choices_in_each_class() -> None:
    scheme = FixedSize(7, 4, microbatches=2)  # of 0, 2, 4, 6 and of 1, 3, 5
    seen = Counter(tuple(d.tolist()) for d in draws(scheme, 9000))
    even, odd = itertools.combinations((0, 2, 4, 6), 2), list(itertools.combinations((1, 3, 5), 2))
    choices = [tuple(sorted(a + b)) for a in even for b in odd]
    assert set(seen) == set(choices)
    assert chi_square([seen[c] for c in choices], [9000 / 18] * 18) > ACCEPT


@given(st.integers(1, 60), st.integers(1, 8), st.data())
def test_no_unit_is_drawn_more_often_than_the_rate_of_fixed_size_microbatches(
    size: int, k: int, data: st.DataObject
) -> None:
    """b of a class's n_j, and the rate is the largest b / n_j."""
    k = min(k, size)
    scheme = FixedSize(size, k * data.draw(st.integers(1, size // k)), microbatches=k)
    classes = [len(range(j, size, k)) for j in range(k)]
    assert scheme.sample_rate == max(scheme.batch_size // k / n for n in classes)
    drawn = np.bincount(scheme.draw(secret(size), EPOCH, 0) % k, minlength=k)
    assert drawn.tolist() == [scheme.batch_size // k] * k


# -- shuffled


@given(st.integers(1, 80), st.binary(min_size=32, max_size=32), st.data())
def test_shuffled_epoch_has_each_record_once(size: int, epoch: bytes, data: st.DataObject) -> None:
    scheme = Shuffled(size, data.draw(st.integers(1, size)))
    batches = [scheme.draw(secret(k), epoch, k) for k in range(scheme.period)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(size))
    assert all(len(b) == scheme.batch_size for b in batches[:-1])
    assert 1 <= len(batches[-1]) <= scheme.batch_size


def test_shuffled_continues_the_same_order_after_a_restart() -> None:
    scheme = Shuffled(100, 9)
    whole = [scheme.draw(secret(k), EPOCH, k) for k in range(scheme.period)]
    schemes.epoch_order.cache_clear()  # what a new process begins with
    rest = [scheme.draw(secret(("another", k)), EPOCH, k) for k in range(5, scheme.period)]
    assert all(np.array_equal(a, b) for a, b in zip(whole[5:], rest, strict=True))


def test_shuffled_order_is_the_same_under_every_version_of_numpy() -> None:
    """Pinned: another order after an upgrade would let a record take part twice in an epoch."""
    scheme = Shuffled(8, 1)
    order = [int(scheme.draw(b"", bytes(range(32)), k)[0]) for k in range(8)]
    assert order == [2, 3, 0, 6, 7, 4, 5, 1]


def test_shuffled_orders_are_uniform_and_differ_between_epochs() -> None:
    scheme = Shuffled(4, 1)
    seen = Counter(tuple(int(scheme.draw(b"", secret(("epoch", e)), k)[0]) for k in range(4)) for e in range(6000))
    assert len(seen) == 24
    assert chi_square(list(seen.values()), [250.0] * 24) > ACCEPT


@pytest.mark.parametrize("slot", [-1, 8])
def test_shuffled_refuses_a_slot_outside_the_epoch(slot: int) -> None:
    with pytest.raises(StepError, match="slot"):
        Shuffled(50, 7).draw(secret(0), EPOCH, slot)


# -- full


def test_full_takes_everything() -> None:
    assert Full(5).draw(secret(0), EPOCH, 0).tolist() == [0, 1, 2, 3, 4]


# -- make_scheme


@pytest.mark.parametrize(
    ("sampling", "numbers", "expected"),
    [
        ("poisson", {"batch_size": 5}, Poisson(50, 0.1)),
        ("poisson", {"sample_rate": 0.2}, Poisson(50, 0.2)),
        (Sampling.FIXED_SIZE, {"batch_size": 5}, FixedSize(50, 5)),
        ("fixed-size", {"batch_size": 50}, FixedSize(50, 50)),
        ("partition", {"batch_size": 5}, Partition(50, 5)),
        ("shuffled", {"batch_size": 5}, Shuffled(50, 5)),
        ("full", {}, Full(50)),
    ],
)
def test_make_scheme(sampling: str, numbers: dict[str, float], expected: Scheme) -> None:
    assert make_scheme(sampling, 50, **numbers) == expected  # type: ignore[arg-type]


def test_make_scheme_takes_numpy_numbers_and_gives_plain_events() -> None:
    shuffled = make_scheme("shuffled", np.int64(50), batch_size=np.int32(7))  # type: ignore[arg-type]
    poisson = make_scheme("poisson", np.int64(50), sample_rate=np.float32(0.5))  # type: ignore[arg-type]
    for scheme in (shuffled, poisson):
        assert Event.from_dict(json.loads(json.dumps(scheme.event(1.0).to_dict()))) == scheme.event(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poisson", 50), "exactly one"),
        (("poisson", 50, 5, 0.1), "exactly one"),
        (("shuffled", 50), "exactly one"),
        (("poisson", 50, None, 0.0), "sample_rate"),
        (("poisson", 50, None, 1.5), "sample_rate"),
        (("poisson", 50, None, math.nan), "sample_rate"),
        (("poisson", 50, 0), "batch_size"),
        (("poisson", 50, 51), "batch_size"),
        (("fixed-size", 50, 51), "batch_size"),
        (("partition", 50, 2.5), "batch_size"),
        (("shuffled", 50, True), "batch_size"),
        (("fixed-size", 50, None, 0.1), "give batch_size"),
        (("partition", 50, None, 0.1), "give batch_size"),
        (("shuffled", 50, None, 0.1), "give batch_size"),
        (("full", 50, 5), "full"),
        (("full", 50, None, 1.0), "full"),
        (("full", 0), "dataset_size"),
        (("poisson", 0, None, 0.1), "dataset_size"),
        (("balls-and-bins", 50, 5), "'poisson', 'truncated-poisson', 'fixed-size'"),
        (("truncated-poisson", 50), "exactly one"),
    ],
)
def test_make_scheme_refuses(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_scheme(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Poisson(0, 0.5),
        lambda: Poisson(5, 0.0),
        lambda: FixedSize(5, 6),
        lambda: Partition(5, 0),
        lambda: Partition(5, 4, microbatches=3),
        lambda: Partition(5, 4, microbatches=0),
        lambda: TruncatedPoisson(5, 0.5, 0),
        lambda: make_scheme("poisson", 5, 2, max_batch_size=5),
        lambda: make_scheme("poisson", 5, 2, microbatches=2),
        lambda: FixedSize(5, 4, microbatches=3),
        lambda: FixedSize(5, 4, microbatches=0),
        lambda: Shuffled(0, 1),
        lambda: Full(0),
    ],
)
def test_schemes_refuse_numbers_out_of_range_when_built_directly(build: object) -> None:
    with pytest.raises(ConfigurationError):
        build()  # type: ignore[operator]
