from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.recipes.tables.schema import Date, Hashed, Ignored, Mixed, Number
from clipwise.recipes.tables.statistics import TARGET_MARGIN, Bins, kind_of, occupied, quantiles, range_of
from clipwise.recipes.tables.values import MISSING, bucket, to_date

FINE = Bins(8, 256)
cells = st.one_of(st.text(max_size=6), st.floats().map(str), st.dates().map(str), st.sampled_from(["", "NA", "?"]))


def noised(values: list[str], std: float, seed: int = 0, bins: Bins = FINE) -> np.ndarray:
    count_K = np.bincount(bins.of(values, MISSING, "."), minlength=bins.count)
    return np.rint(count_K + std * np.random.default_rng(seed).standard_normal(bins.count)).astype(np.int64)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(cells, min_size=1, max_size=5), st.sampled_from([FINE, Bins(2, 32)]))
def test_every_cell_has_one_bin_that_depends_on_it_alone(values: list[str], bins: Bins) -> None:
    found = bins.of(values, MISSING, ".")
    assert ((found >= 0) & (found < bins.count)).all()
    assert found.tolist() == [bins.of([value], MISSING, ".")[0] for value in values]


def test_the_parts_of_the_histogram() -> None:
    numbers, years, buckets = FINE.starts
    found = FINE.of(["", "0", "-1e300", "inf", "2020-05-05", "0001-01-01", "x"], MISSING, ".").tolist()
    assert found[0] == 0 and found[2] == numbers and found[3] == years - 1
    assert FINE.edges[found[1] - numbers] == -1e-6 and FINE.edges[found[1] - numbers + 1] == 1e-6
    assert found[4] == years + 120 and found[5] == years and found[6] == buckets + bucket("x", 256)
    assert Bins.suitable(10**6, 50.0) == FINE and Bins.suitable(500, 80.0).count < FINE.count


def test_quantiles_of_numbers() -> None:
    values = np.random.default_rng(1).lognormal(3, 1, 20_000)
    kind, remark = kind_of(noised([str(v) for v in values], 20.0), 20.0, FINE)
    assert isinstance(kind, Number) and "number" in remark
    shares = np.searchsorted(np.sort(values), kind.points) / len(values)
    wanted = np.linspace(0, 1, len(kind.points))
    assert np.abs(shares - wanted).max() < 0.06 and list(kind.points) == sorted(kind.points)


def test_a_value_of_many_rows_and_a_constant() -> None:
    kind, _ = kind_of(noised(["0"] * 9000 + ["5000"] * 1000, 20.0), 20.0, FINE)
    assert isinstance(kind, Number) and kind.points[:5] == (0.0,) * 5 and 4000 < kind.points[-1] < 6000
    constant, _ = kind_of(noised(["7"] * 5000, 20.0), 20.0, FINE)
    assert isinstance(constant, Number) and constant.points[0] <= 7 <= constant.points[-1] <= 8


@pytest.mark.slow
def test_dates_text_ids_and_hidden_columns() -> None:
    days = [str(to_date(18_000 + i % 900)) for i in range(5000)]
    kind, _ = kind_of(noised(days, 20.0), 20.0, FINE)
    assert isinstance(kind, Date) and (to_date(kind.low).year, to_date(kind.high).year) == (2019, 2022)
    kind, _ = kind_of(noised(["red"] * 3000 + ["blue"] * 2000 + [f"rare{i}" for i in range(50)], 20.0), 20.0, FINE)
    assert kind == Hashed(256, tuple(sorted((bucket("red", 256), bucket("blue", 256)))))
    kind, remark = kind_of(noised([f"user{i}" for i in range(20_000)], 30.0), 30.0, FINE)
    assert isinstance(kind, (Hashed, Ignored))  # ids: a bucket is frequent only by chance
    crowd = [f"user{i}" for i in range(200_000)]
    kind, remark = kind_of(noised(crowd, 30.0), 30.0, FINE)
    assert kind == Ignored() and "without frequent values" in remark
    kind, _ = kind_of(noised([*crowd, *["guest"] * 5000], 30.0), 30.0, FINE)
    assert kind == Hashed(256, (bucket("guest", 256),))
    hidden, remark = kind_of(noised(["1", "2"], 50.0), 50.0, FINE)
    assert isinstance(hidden, Mixed) and "noise hides" in remark


@pytest.mark.parametrize("bins", [120, 600])
def test_noise_alone_is_rarely_taken_for_values(bins: int) -> None:
    random = np.random.default_rng(2)
    noise = [np.rint(40 * random.standard_normal(bins)) for _ in range(300)]
    assert 5 < sum(occupied(each, 40.0).any() for each in noise) < 40  # few percent for each of the window sizes
    assert not any(occupied(each, 40.0, TARGET_MARGIN).any() for each in noise)


def test_noise_alone_is_no_range_of_a_target() -> None:
    texts = [f"label {row}" for row in range(200)]
    assert all(range_of(noised(texts, 20.0, seed, Bins(2, 32)), 20.0, Bins(2, 32)) == (None, 0) for seed in range(200))


def test_wide_windows_find_what_is_spread_out() -> None:
    count_K = np.zeros(64)
    count_K[16:32] = 60
    noisy = np.rint(count_K + 40 * np.random.default_rng(3).standard_normal(64)).astype(np.int64)
    found = occupied(noisy, 40.0)
    assert found[16:32].sum() > 0.5 * found.sum() > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=289, max_size=289).filter(any))
def test_quantiles_rise_and_stay_on_the_grid(counts: list[int]) -> None:
    found = quantiles(np.array(counts, float), FINE.edges)
    assert list(found) == sorted(found) and all(math.isfinite(x) and abs(x) <= 1e12 for x in found)


def test_the_range_of_a_target() -> None:
    values = [str(v) for v in np.random.default_rng(4).uniform(20, 90, 5000)]
    found, distinct = range_of(noised(values, 10.0), 10.0, FINE)
    assert found is not None and 10 < found[0] <= 20 and 90 <= found[1] < 140 and 5 <= distinct <= 8
    assert range_of(noised(["0"] * 3000 + ["9"] * 3000, 10.0), 10.0, FINE) == ((0.0, 10.0), 2)
    assert range_of(noised(["a"] * 3000, 10.0), 10.0, FINE) == (None, 0)
