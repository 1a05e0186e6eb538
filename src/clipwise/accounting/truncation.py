"""The cost of rare events: truncated batches (truncated Poisson sampling), and releases that fail.

A step that truncates batches above a limit differs from the step that does not only if the batch size, which is
Binomial(N, q), exceeds the limit. This has probability tau = P[Binomial(N, q) > limit]. On one data set, with the same
random numbers, all steps together therefore differ with probability at most X = sum_t tau_t, for any earlier releases.
So for neighbours D and D', the mechanism M, its version M* without truncation, any set S of outputs and any
(epsilon, delta) of M*,

    P[M(D) in S] <= P[M*(D) in S] + X
                 <= e^epsilon P[M*(D') in S] + delta + X
                 <= e^epsilon P[M(D') in S] + delta + (1 + e^epsilon) X.

Neither data set has more than N units that can be drawn, so the same tau holds for both.

A release by a stability threshold fails on *one* of two neighbours under zero-out: if the record is the only one with a
value, the value may be shown, and without the record it cannot be. Let F bound the sum of the probabilities of these
failures, for any earlier releases. Let G be M on D given that nothing fails: it releases Gaussian mechanisms alone,
because the noise of each value is independent of all other noise. Then M(D) = (1 - F') G + F' B for some F' <= F and
some B, and M on D' never fails. If (G, M(D')) are (epsilon, delta)-indistinguishable, then for any S

    P[M(D) in S] <= P[G in S] + F <= e^epsilon P[M(D') in S] + delta + F,

and in the other direction, where it is enough to take S with e^epsilon (1 - F) G <= P[M(D')] pointwise,

    P[M(D') in S] - e^epsilon P[M(D) in S] <= P[M(D') in S] - e^epsilon (1 - F) P[G in S]
                                           <= delta + F e^epsilon P[G in S] <= delta + F / (1 - F).

So failures cost F / (1 - F). Unlike truncation, which changes both data sets, they need no factor e^epsilon.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from scipy import special

from clipwise.errors import ConfigurationError

# Below this, tau times e^epsilon times any number of steps is negligible against any useful delta.
NEGLIGIBLE = 1e-20
# The error of betainc is far below this.
SLACK = 1e-6
# Smaller figures count as 0.
LEAST = 1e-290


def excess(dataset_size: int, sample_rate: float, limit: int) -> float:
    """tau, from above: the probability that more than `limit` of `dataset_size` units are drawn."""
    if limit >= dataset_size:
        return 0.0
    tail = float(special.betainc(limit + 1, dataset_size - limit, sample_rate)) * (1 + SLACK)
    chernoff = math.exp(_log_chernoff(dataset_size, sample_rate, limit))
    return min(1.0, max(tail if tail > LEAST else chernoff, LEAST))


def default_limit(dataset_size: int, sample_rate: float) -> int:
    """The smallest limit that is exceeded with probability at most NEGLIGIBLE, by Chernoff's bound.

    It is about 9.5 standard deviations above the mean. 6 would be exceeded once in 10^8 steps: too often at delta =
    1e-5.
    """

    def is_enough(limit: int) -> bool:
        return _log_chernoff(dataset_size, sample_rate, limit) <= math.log(NEGLIGIBLE)

    return bisect_left(range(dataset_size), True, lo=math.floor(dataset_size * sample_rate), key=is_enough)


def _log_chernoff(dataset_size: int, sample_rate: float, limit: int) -> float:
    """log P[Binomial(N, q) >= N a] <= -N (a log(a/q) + (1-a) log((1-a)/(1-q))) for a = (limit + 1) / N > q."""
    a = (limit + 1) / dataset_size
    if a <= sample_rate:
        return 0.0
    drawn = a * math.log(a / sample_rate)
    left_out = (1 - a) * (math.log1p(-a) - math.log1p(-sample_rate)) if a < 1 else 0.0
    rounding = 1e-14 * (abs(drawn) + abs(left_out))
    return min(0.0, -dataset_size * (drawn + left_out - rounding))


def added_delta(epsilon: float, total_excess: float, total_failure: float = 0.0) -> float:
    """(1 + e^epsilon) X + F / (1 - F), rounded up."""
    if total_excess == 0 and total_failure == 0:
        return 0.0
    if total_failure >= 1 or (total_excess > 0 and epsilon > 700):  # e^epsilon may overflow; delta is never above 1
        return 1.0
    cut = (1 + math.exp(epsilon)) * total_excess if total_excess > 0 else 0.0
    return min(1.0, (cut + total_failure / (1 - total_failure)) * (1 + 1e-12))


def require_feasible(epsilon: float, delta: float, total_excess: float, total_failure: float = 0.0) -> None:
    """Refuse a budget that truncated batches or failures use up with any noise."""
    if added_delta(epsilon, 0.0, total_failure) > 0.99 * delta:
        raise ConfigurationError(
            f"delta={delta:g} is too small for releases that fail with probability {total_failure:g}: no noise is "
            "enough. Give a larger delta, or a smaller probability of failure."
        )
    if added_delta(epsilon, total_excess, total_failure) > 0.99 * delta:
        raise ConfigurationError(
            f"max_batch_size is too small for epsilon={epsilon:g} at delta={delta:g}: batches are truncated so often "
            "that no noise is enough. Leave it out, or give a larger one."
        )


def epsilon(
    untruncated: Callable[[float], float], delta: float, total_excess: float, total_failure: float = 0.0
) -> float:
    """The smallest epsilon with delta*(epsilon) + added_delta(epsilon) <= delta, from above; inf if there is none.

    `untruncated` is E(d), the smallest epsilon of the steps without truncation or failures at delta = d, or an upper
    bound on it. delta* is convex in e^epsilon, and so is the left side: the solutions are an interval, those with
    E(delta - added_delta(epsilon)) <= epsilon. To find its left end, begin at 0 and repeatedly move to the value of E:
    E only grows, so no point of the interval is skipped. A small amount is added to each point so that the search
    ends, and a point is returned only after E has confirmed it.
    """
    if total_excess == 0 and total_failure == 0:
        return untruncated(delta)
    point = 0.0
    for _ in range(60):
        left = (delta - added_delta(point, total_excess, total_failure)) * (1 - 1e-12)
        if left <= 0:
            return math.inf
        needed = untruncated(left)
        if needed <= point:
            return point
        point = needed * (1 + 1e-6)
    return math.inf
