"""The Pareto front against its definition."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from clipwise.tune.subject import Point, front

POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30).map(
    lambda pairs: [Point(a / 6, float(e), number=i) for i, (a, e) in enumerate(pairs)]
)


def beats(one: Point, other: Point) -> bool:
    """At least as good in both, and better in one."""
    no_worse = one.accuracy >= other.accuracy and one.epsilon <= other.epsilon
    return no_worse and (one.accuracy > other.accuracy or one.epsilon < other.epsilon)


@given(POINTS)
def test_no_run_beats_one_of_the_front(points):
    for chosen in front(points):
        assert not any(beats(other, chosen) for other in points)


@given(POINTS)
def test_every_run_is_beaten_or_equalled_by_one_of_the_front(points):
    found = front(points)
    for p in points:
        same = any((f.accuracy, f.epsilon) == (p.accuracy, p.epsilon) for f in found)
        assert same or any(beats(f, p) for f in found)


@given(POINTS)
def test_the_front_rises(points):
    found = front(points)
    assert all(a.epsilon < b.epsilon and a.accuracy < b.accuracy for a, b in itertools.pairwise(found))
