from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise import accounting
from clipwise.errors import BudgetExhausted, ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Entry, Event, Part, effective_multiplier
from clipwise.recipes.counts import NoisedCounts, _counts, threshold


def nothing(event: Event) -> None:
    pass


def counts(z: float = 2.0, delta: float = 0.0, seed: int = 0) -> NoisedCounts:
    return NoisedCounts(z, nothing, delta=delta, key=NoiseKey.from_seed(seed))


def test_what_is_released_is_the_count_plus_whole_numbers_of_the_stated_spread() -> None:
    bins_N = np.repeat(np.arange(4000), 3)
    released = counts(20.0).release({"a": (bins_N, 4000), "b": (np.full(len(bins_N), -1), 4000)})
    for name, true in (("a", 3), ("b", 0)):
        noise = released.histograms[name] - true
        assert noise.dtype == np.int64 and released.std[name] == pytest.approx(20 * math.sqrt(2))
        smooth = noise + np.random.default_rng(0).uniform(-0.5, 0.5, 4000)
        assert stats.kstest(smooth / released.std[name], "norm")[1] > 1e-3
    assert not np.array_equal(released.histograms["a"] - 3, released.histograms["b"])  # each name has noise of its own


def test_the_event_is_charged_before_any_noise_and_a_refused_one_releases_nothing() -> None:
    class Key(NoiseKey):
        def derive(self, label: str) -> bytes:
            log.append("noise")
            return super().derive(label)

    log: list[object] = []
    given = NoisedCounts(3.0, log.append, delta=1e-6, key=Key.fresh())
    given.release({"a": (np.array([0]), 1)}, {"s": ["x"]})
    assert log == [given.event(True), *["noise"] * 3] and given.event(True).excess == 1e-6

    def refuse(event: Event) -> None:
        raise BudgetExhausted("no")

    with pytest.raises(BudgetExhausted):
        log.clear()
        NoisedCounts(3.0, refuse, key=Key.fresh()).release({"a": (np.array([0]), 1)})
    assert log == []


def test_a_key_of_its_own_and_one_release_only() -> None:
    given = {"a": (np.zeros(5, np.int64), 50)}
    one, other = (NoisedCounts(9.0, nothing).release(given).histograms["a"] for _ in range(2))
    assert not np.array_equal(one, other)
    assert np.array_equal(counts().release(given).histograms["a"], counts().release(given).histograms["a"])
    used = counts()
    used.release(given)
    with pytest.raises(ConfigurationError, match="was called before"):
        used.release(given)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-1, 4)] * 3), min_size=1, max_size=12), st.data())
def test_neighbours_differ_by_at_most_the_sensitivity(rows: list[tuple[int, ...]], data: st.DataObject) -> None:
    weights = {str(k): data.draw(st.floats(0.1, 10)) for k in range(3)}
    empty = data.draw(st.integers(0, len(rows) - 1))
    other = [(-1, -1, -1) if i == empty else row for i, row in enumerate(rows)]
    std = counts(2.0).release({n: (np.array([0]), 5) for n in weights}, weights=weights).std
    moved = 0.0
    for k in range(3):
        one, two = (_counts("", np.array([row[k] for row in side]), 5) for side in (rows, other))
        assert np.abs(one - two).sum() <= 1
        moved += float(((one - two) ** 2).sum()) / std[str(k)] ** 2
    assert math.sqrt(moved) <= 1 / 2.0  # distance over noise is at most 1 / z
    assert effective_multiplier([Part(n, (), 1.0, std[n]) for n in weights]) == pytest.approx(2.0)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 1e4), st.floats(-14, -0.31))
def test_the_threshold_is_the_closed_form(std: float, log_delta: float) -> None:
    delta = 10**log_delta
    least = threshold(std, delta)
    # round(1 + N) >= T if and only if 1 + N >= T - 1/2.
    assert stats.norm.sf((least - 1.5) / std) <= delta
    assert least == 1 or least <= 2 or stats.norm.sf((least - 1 - 1.5) / std) > delta * (1 - 1e-6)


@pytest.mark.parametrize("delta", [0.2, 0.01])
def test_a_string_of_one_row_is_shown_with_probability_at_most_delta(delta: float) -> None:
    trials, rows = 3000, ["common"] * 400 + ["rare"]
    shown = [counts(5.0, delta, seed).release({}, {"s": rows}).strings["s"] for seed in range(trials)]
    rare = sum("rare" in each for each in shown)
    assert stats.binom.sf(rare - 1, trials, delta) > 1e-4
    assert rare > 0.5 * trials * delta  # and the threshold is not far above what it must be
    assert all("common" in each for each in shown)


def test_the_order_of_rows_does_not_matter_and_missing_strings_count_nowhere() -> None:
    rows = ["b"] * 30 + ["a"] * 40 + [None] * 50 + ["c"] * 20
    one = counts(0.5, 1e-3).release({}, {"s": rows}).strings["s"]
    other = counts(0.5, 1e-3).release({}, {"s": rows[::-1]}).strings["s"]
    assert one == other and list(one) == ["a", "b", "c"]
    assert counts(0.5, 1e-3).release({}, {"s": [None, None]}).strings["s"] == {}


def test_public_candidates_are_released_whether_rows_have_them_or_not() -> None:
    rows = ["yes"] * 40 + ["no"] * 2 + ["other"] * 900 + ["rare"] * 3
    given = counts(5.0, 1e-6).release({}, {"s": rows}, candidates={"s": ["no", "yes", "maybe"]})
    assert list(given.candidates["s"]) == ["maybe", "no", "yes"] and list(given.strings["s"]) == ["other"]
    assert abs(given.candidates["s"]["yes"] - 40) < 30 and abs(given.candidates["s"]["maybe"]) < 30
    without = counts(5.0, 1e-6).release({}, {"s": []}, candidates={"s": ["no", "yes", "maybe"]})
    noise = {text: value - rows.count(text) for text, value in given.candidates["s"].items()}
    assert without.candidates["s"] == noise


def test_without_noise_everything_is_released() -> None:
    released = counts(0.0, 1e-3).release({"a": (np.array([1, 1, -1]), 3)}, {"s": ["x", "y", "x"]})
    assert released.histograms["a"].tolist() == [0, 2, 0] and released.strings["s"] == {"x": 2, "y": 1}
    assert accounting.epsilon_of([Entry(counts(0.0).event(False), 1)], 1e-5) == math.inf


def test_what_is_not_possible_is_refused() -> None:
    for wrong, words in (
        (({}, {}), "nothing to release"),
        (({"a": (np.array([5]), 5)},), "bin is not below"),
        (({"a": (np.array([-2]), 5)},), "at least -1"),
        (({"a": (np.array([0.5]), 5)},), "whole number"),
        (({"a": (np.array([0]), 1)}, {"a": ["x"]}), "is in histograms and in strings"),
        (({}, {"s": ["x"]}), "strings need delta > 0"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            counts().release(*wrong)
    with pytest.raises(ConfigurationError, match="weights"):
        counts().release({"a": (np.array([0]), 1)}, weights={"a": 0.0})
