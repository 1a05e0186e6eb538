"""Inverts the accountants: the noise, the number of steps or the sampling rate for a budget.

The accountant confirms every returned value. A search starts at a guess and narrows its bracket by interpolation, so it
needs four to ten of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from clipwise.accounting import filter as renyi
from clipwise.accounting import gaussian, truncation
from clipwise.accounting.accountants import epsilon_of
from clipwise.accounting.composition import LARGEST_NOISE, compose
from clipwise.accounting.from_arguments import MOST_STEPS, budget, count, probability
from clipwise.errors import ConfigurationError
from clipwise.privacy import Entry, Event, Sampling
from clipwise.validation.arguments import number, one_of

# The returned noise is within this factor of the smallest, and rounded up to this many digits.
TOLERANCE = 5e-4
DIGITS = 5
# The schemes with a free rate, and the smallest rate that is tried.
SEARCHABLE = (Sampling.POISSON, Sampling.FIXED_SIZE, Sampling.PARTITION)
SMALLEST_RATE = 1e-9


def smallest_noise(event: Event, steps: int, epsilon: float, delta: float, beside: Sequence[Entry] = ()) -> float:
    """The smallest noise multiplier with which `steps` events like `event` are (epsilon, delta)-private.

    The noise of `event` itself does not matter. The releases in `beside`, also fixed in advance, share the guarantee.
    """
    steps, delta = count("steps", steps), probability("delta", delta)
    epsilon = number("epsilon", epsilon, above=0)
    once = compose([Entry(event, 1)])
    truncation.require_feasible(epsilon, delta, steps * once.excess, steps * once.failure)
    if steps == 0:
        return 0.0

    def cost(z: float) -> float:
        return epsilon_of([*beside, Entry(replace(event, noise_multiplier=z), steps)], delta)

    if beside and cost(LARGEST_NOISE) > epsilon:
        raise ConfigurationError(
            f"epsilon={epsilon:g} at delta={delta:g} leaves nothing for the steps: the other releases use it up."
        )
    return _least_noise(cost, epsilon, _guess(event, steps, gaussian.largest_mu(epsilon, delta)))


def smallest_noise_after(
    history: Sequence[Entry], event: Event, steps: int, epsilon: float, delta: float, order: float
) -> float | None:
    """The smallest noise multiplier with which `steps` events like `event` fit into the budget left by a history.

    It uses the Renyi filter at `order`, so it holds even if the run is planned after earlier releases were seen. None
    if no noise is enough.
    """

    def planned(z: float) -> Entry:
        return Entry(replace(event, noise_multiplier=z), steps)

    def total(z: float) -> float:
        return renyi.epsilon_at(order, [*history, planned(z)], delta, budget=epsilon)

    # Divergences add up, so this run may use the rest. It is nearly a power of z, which suits the search.
    held = sum(renyi.divergence_at(order, entry) for entry in history)
    left = epsilon - renyi.conversion_at(order, delta) - held
    if not left > 0 or total(LARGEST_NOISE) > epsilon:
        return None
    start = _guess(event, steps, math.sqrt(2 * left / order))
    found = _least_noise(lambda z: renyi.divergence_at(order, planned(z)), left, start)
    while total(found) > epsilon:  # needed only because of rounding
        found = _up(found * (1 + TOLERANCE))
    return found


def most_steps(event: Event, epsilon: float, delta: float) -> int:
    """The largest number of events like `event` that is (epsilon, delta)-private; raises if there is none.

    From 100,000 steps on it is rounded down, by less than 0.002 percent.
    """
    epsilon, delta = budget(epsilon), probability("delta", delta)

    def cost(steps: float) -> float:
        return epsilon_of([Entry(event, int(steps))], delta)

    good, bad = (1.0, cost(1)), None
    if good[1] > epsilon:
        raise ConfigurationError(
            f"epsilon={epsilon:g} at delta={delta:g} is too small for even one step, which costs {good[1]:.4g} with "
            f"noise_multiplier={event.noise_multiplier:g}: allow a larger epsilon, add noise or sample less."
        )
    steps = max(2, min(_guessed_steps(event, epsilon, delta), MOST_STEPS))
    while bad is None:
        point = (float(steps), cost(steps))
        if point[1] > epsilon:
            bad = point
        elif steps == MOST_STEPS:
            return MOST_STEPS
        else:
            good, steps = point, min(2 * steps, MOST_STEPS)
    return int(_narrow(cost, epsilon, good, bad, round, lambda a, b: abs(a - b) <= max(1, 2e-5 * min(a, b))))


def largest_rate(
    event: Event, epsilon: float, delta: float, *, steps: int | None = None, epochs: float | None = None
) -> float:
    """The largest sampling rate with which steps like `event` are (epsilon, delta)-private; raises if there is none.

    Give `steps` for any rate, or `epochs`: a rate q then takes epochs / q steps.
    """
    one_of("sampling", event.sampling, SEARCHABLE)
    epsilon, delta = budget(epsilon), probability("delta", delta)
    if (steps is None) == (epochs is None):
        raise ConfigurationError("Give either steps or epochs: the length of the run.")
    length = count("steps", steps) if epochs is None else number("epochs", epochs, above=0)

    def steps_at(rate: float) -> float:
        return length if epochs is None else length / rate

    def cost(inverse: float) -> float:
        """The cost at rate 1 / inverse, which falls as `inverse` grows."""
        rate = _down(1 / inverse)
        taken = steps_at(rate)
        if taken > MOST_STEPS:
            return math.inf
        return epsilon_of([Entry(replace(event, sample_rate=rate), math.ceil(taken))], delta)

    def rounding(inverse: float) -> float:
        return 1 / _down(1 / min(max(inverse, 1.0), 1 / SMALLEST_RATE))

    full = (1.0, cost(1.0))
    if full[1] <= epsilon:
        return 1.0
    start = rounding(_guessed_inverse_rate(event, epsilon, delta, steps_at))
    good, bad = _around(cost, epsilon, start, rounding, bad=full, furthest=rounding(math.inf))
    if good is None:
        raise ConfigurationError(
            f"epsilon={epsilon:g} at delta={delta:g} is too small for any sample_rate: even {SMALLEST_RATE:g} costs "
            f"{bad[1]:.4g} with noise_multiplier={event.noise_multiplier:g}. Allow a larger epsilon or add noise."
        )
    return _down(1 / _narrow(cost, epsilon, good, bad, rounding, _close))


def _least_noise(cost: Callable[[float], float], budget: float, start: float) -> float:
    good, bad = _around(cost, budget, _up(start), _up)
    assert good is not None  # some noise is always enough
    return _narrow(cost, budget, good, bad, _up, _close)


def _up(value: float) -> float:
    places = DIGITS - 1 - math.floor(math.log10(value))
    return round(math.ceil(value * 10.0**places) * 10.0**-places, places)


def _down(value: float) -> float:
    places = DIGITS - 1 - math.floor(math.log10(value))
    return round(math.floor(value * 10.0**places * (1 + 1e-12)) * 10.0**-places, places)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(a, b)


def steps_within(history: Sequence[Entry], event: Event, epsilon: float, delta: float, at_most: int) -> int:
    """The largest number of further steps of `event` after `history` within (epsilon, delta), up to `at_most`; or 0.

    The steps are a separate entry. To continue a shuffled epoch, leave out the entry that has begun it and subtract its
    count.
    """
    epsilon, delta = number("epsilon", epsilon, least=0), probability("delta", delta)
    at_most = count("at_most", at_most)

    def cost(steps: float) -> float:
        return epsilon_of([*history, Entry(event, int(steps))], delta)

    all_of_them, none_of_them = (at_most, cost(at_most)), (0, cost(0))
    if all_of_them[1] <= epsilon:
        return at_most
    if none_of_them[1] > epsilon:
        return 0
    return int(_narrow(cost, epsilon, none_of_them, all_of_them, round, lambda a, b: abs(a - b) <= 1))


def _guess(event: Event, steps: int, mu: float) -> float:
    """The noise at which the privacy losses have the variance of the Gaussian mechanism with this mu.

    It is exact without amplification. Otherwise it is the central limit theorem, which is no bound and only starts
    the search.
    """
    entry = Entry(replace(event, noise_multiplier=1.0), steps)
    unamplified = compose([entry]).unamplified_mu / mu
    if not compose([entry]).steps:
        return unamplified

    def is_too_little(log_z: float) -> bool:
        return steps * gaussian.loss_moments(event.sample_rate, math.exp(log_z))[1] > mu * mu

    return _first_enough(is_too_little, -5.0, max(math.log(unamplified), 0.0))


def _guessed_steps(event: Event, epsilon: float, delta: float) -> int:
    mu = gaussian.largest_mu(epsilon, delta)
    amplified = compose([Entry(event, 1)]).steps
    z = min(event.noise_multiplier, LARGEST_NOISE)
    variance = gaussian.loss_moments(event.sample_rate, z)[1] if amplified else 1 / (z * z * event.period)
    return int(min(mu * mu / max(variance, 1e-300), MOST_STEPS))


def _guessed_inverse_rate(event: Event, epsilon: float, delta: float, steps_at: Callable[[float], float]) -> float:
    """1 / the rate that the same central limit allows, by bisection of its logarithm."""
    mu = gaussian.largest_mu(epsilon, delta)
    z = min(max(event.noise_multiplier, 1e-2), LARGEST_NOISE)

    def is_too_little(log_inverse: float) -> bool:
        rate = math.exp(-log_inverse)
        return steps_at(rate) * gaussian.loss_moments(rate, z)[1] > mu * mu

    return _first_enough(is_too_little, 0.0, -math.log(SMALLEST_RATE))


def _first_enough(is_too_little: Callable[[float], bool], low: float, high: float) -> float:
    """About e^x for the smallest sufficient x in [low, high], by bisection."""
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_too_little(middle) else (low, middle)
    return math.exp(high)


Point = tuple[float, float]  # a point and its cost
Rounding = Callable[[float], float]


def _around(
    cost: Callable[[float], float],
    budget: float,
    start: float,
    rounding: Rounding,
    *,
    bad: Point | None = None,
    furthest: float = math.inf,
) -> tuple[Point | None, Point]:
    """A point within the budget and one beyond it, for a cost that falls as x grows.

    Models the cost as a power x^-k, with k from the last two points. If the point at `furthest` exceeds the budget,
    there is no point within it.
    """
    good: Point | None = None
    power = 2.0
    point = (start, cost(start))
    while True:
        if point[1] <= budget:
            good = point
        else:
            bad = point
        if bad is not None and (good is not None or bad[0] >= furthest):
            return good, bad
        excess = math.log(min(max(point[1] / budget, 1e-3), 1e3)) / power
        beyond = 0.002 if excess > 0 else -0.002
        x = rounding(point[0] * math.exp(min(max(excess, -1.0), 1.0) + beyond))
        previous, point = point, (x, cost(x))
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
    """Narrow the bracket of a point within the budget and one beyond it; return the first, at a computed cost."""
    attempt = 0
    while not close(good[0], bad[0]):
        share = 0.5
        if attempt % 3 < 2 and good[1] > 0 and math.isfinite(bad[1]):
            share = math.log(budget / good[1]) / math.log(bad[1] / good[1])
            # Slightly away from the nearer end, so that this end moves to the boundary.
            share += 0.05 if share < 0.5 else -0.05
        x = rounding(good[0] + share * (bad[0] - good[0]))
        if not min(good[0], bad[0]) < x < max(good[0], bad[0]):
            x = rounding(0.5 * (good[0] + bad[0]))
        point = (x, cost(x))
        good, bad = (point, bad) if point[1] <= budget else (good, point)
        attempt += 1
    return good[0]
