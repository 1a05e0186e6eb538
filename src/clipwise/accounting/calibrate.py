"""The inverse questions: how much noise for a budget, and how many steps within one.

Both answers are checked with the PLD accountant itself: what is returned satisfies the budget, not what
was searched for. A privacy loss distribution costs up to 0.3 s, so a search begins at a guess and narrows its
bracket by interpolation: four to ten of them are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from clipwise.accounting import gaussian, pld
from clipwise.accounting.composition import compose
from clipwise.privacy import Entry, Event

# The noise returned is within this factor of the smallest, and rounded up to so many digits.
TOLERANCE = 5e-4
DIGITS = 5


def smallest_noise(event: Event, steps: int, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier with which `steps` events like `event` are (epsilon, delta)-private.

    Args:
        event: the kind of step; its own noise multiplier does not matter.
        steps: how many of them.
        epsilon: the budget.
        delta: its delta.
    """
    if steps == 0:
        return 0.0

    def cost(z: float) -> float:
        return pld.epsilon([Entry(replace(event, noise_multiplier=z), steps)], delta)

    def candidate(z: float) -> float:
        places = DIGITS - 1 - math.floor(math.log10(z))
        return round(math.ceil(z * 10.0**places) * 10.0**-places, places)

    good, bad = _around(cost, epsilon, candidate(_guess(event, steps, epsilon, delta)), candidate)
    return _narrow(cost, epsilon, good, bad, candidate, lambda a, b: abs(a - b) <= TOLERANCE * max(a, b))


def steps_within(history: Sequence[Entry], event: Event, epsilon: float, delta: float, at_most: int) -> int:
    """The largest number of further steps of `event` after `history` that keeps within (epsilon, delta).

    The steps are counted as an entry of their own. To go on with a shuffled epoch that the last entry of
    `history` has begun, leave that entry out and subtract its count from the answer.

    Args:
        history: what was released already.
        event: the kind of step to come.
        epsilon: the budget.
        delta: its delta.
        at_most: stop looking here; also the answer if all of them fit.
    """

    def cost(steps: float) -> float:
        return pld.epsilon([*history, Entry(event, int(steps))], delta)

    all_of_them, none_of_them = (at_most, cost(at_most)), (0, cost(0))
    if all_of_them[1] <= epsilon:
        return at_most
    if none_of_them[1] > epsilon:
        return 0
    return int(_narrow(cost, epsilon, none_of_them, all_of_them, round, lambda a, b: abs(a - b) <= 1))


def _guess(event: Event, steps: int, epsilon: float, delta: float) -> float:
    """The noise at which the privacy losses have the variance of the Gaussian mechanism on the budget.

    Exact if nothing is amplified. Else it is the central limit theorem, which bounds nothing: the search only
    starts here.
    """
    mu = gaussian.largest_mu(epsilon, delta)
    entry = Entry(replace(event, noise_multiplier=1.0), steps)
    unamplified = compose([entry]).unamplified_mu / mu
    if not compose([entry]).steps:
        return unamplified
    low, high = -5.0, max(math.log(unamplified), 0.0)
    for _ in range(20):
        middle = 0.5 * (low + high)
        _, variance = gaussian.loss_moments(event.sample_rate, math.exp(middle))
        low, high = (middle, high) if steps * variance > mu * mu else (low, middle)
    return math.exp(high)


Point = tuple[float, float]  # where, and what it costs
Rounding = Callable[[float], float]


def _around(
    cost: Callable[[float], float], budget: float, start: float, rounding: Rounding
) -> tuple[Point, Point]:
    """A point within the budget and one beyond it, for a cost that falls with more noise.

    Takes the cost for a power z^-k, with k from the last two points, and steps a little past its boundary.
    """
    good: Point | None = None
    bad: Point | None = None
    power = 2.0
    point = (start, cost(start))
    while True:
        if point[1] <= budget:
            good = point
        else:
            bad = point
        if good is not None and bad is not None:
            return good, bad
        excess = math.log(min(max(point[1] / budget, 1e-3), 1e3)) / power
        beyond = 0.002 if excess > 0 else -0.002
        z = rounding(point[0] * math.exp(min(max(excess, -1.0), 1.0) + beyond))
        previous, point = point, (z, cost(z))
        if 0 < point[1] < math.inf and 0 < previous[1] < math.inf and point[1] != previous[1]:
            power = math.log(previous[1] / point[1]) / math.log(point[0] / previous[0])
            power = min(max(power, 0.5), 20.0)


def _narrow(
    cost: Callable[[float], float],
    budget: float,
    good: Point,
    bad: Point,
    rounding: Rounding,
    close: Callable[[float, float], bool],
) -> float:
    """Move a point within the budget and one beyond it together; return the first, whose cost was computed."""
    attempt = 0
    while not close(good[0], bad[0]):
        share = 0.5
        if attempt % 3 < 2 and good[1] > 0 and math.isfinite(bad[1]):
            share = math.log(budget / good[1]) / math.log(bad[1] / good[1])
            # A little away from the nearer end, so that it is that end which moves up to the boundary.
            share += 0.05 if share < 0.5 else -0.05
        x = rounding(good[0] + share * (bad[0] - good[0]))
        if not min(good[0], bad[0]) < x < max(good[0], bad[0]):
            x = rounding(0.5 * (good[0] + bad[0]))
        point = (x, cost(x))
        good, bad = (point, bad) if point[1] <= budget else (good, point)
        attempt += 1
    return good[0]
