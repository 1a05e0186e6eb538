"""Which of two methods is better, against scipy and against plain cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from experiments.lip_dp_sgd.compare import compare

TEN = st.lists(st.floats(0, 1), min_size=10, max_size=10)


def test_ten_of_ten_is_decided():
    first = [0.9 + i / 1000 for i in range(10)]
    found = compare(first, [a - 0.02 - i / 10000 for i, a in enumerate(first)])
    assert found.verdict == 1 and found.p == pytest.approx(2 / 2**10)
    assert found.difference > 0.02
    assert compare([a - 0.1 for a in first], first).verdict == -1


def test_equal_ones_are_open():
    assert compare([0.5] * 10, [0.5] * 10).verdict == 0


def test_three_seeds_decide_nothing():
    assert compare([0.9, 0.91, 0.92], [0.1, 0.11, 0.12]).verdict == 0


def test_a_small_lead_with_changing_signs_is_open():
    first = [0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 0.62]
    second = [0.6, 0.5] * 5
    assert compare(first, second).verdict == 0


@settings(max_examples=15)
@given(TEN, TEN)
def test_it_is_antisymmetric(first, second):
    one, two = compare(first, second), compare(second, first)
    assert one.p == pytest.approx(two.p) and one.verdict == -two.verdict


def test_without_ties_it_is_the_usual_test():
    first, second = [0.1 * i + 0.01 * i * i for i in range(10)], [0.15 * i + 0.03 for i in range(10)]
    assert compare(first, second).p == pytest.approx(wilcoxon(first, second).pvalue)


def test_nothing_to_compare():
    assert compare([], []) is None and compare([0.5], []) is None
