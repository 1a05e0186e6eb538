"""A privacy budget for schedules that are chosen during the run, from earlier releases.

Accountants need multipliers and rates that were fixed in advance. If they are chosen from released values, the
spending is itself random, and summing it afterwards is no bound. A filter decides before each step whether it may be
made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from clipwise.accounting import rdp, truncation
from clipwise.accounting.composition import compose, require_one_guarantee
from clipwise.accounting.from_arguments import count as checked_count
from clipwise.accounting.gaussian import Array
from clipwise.errors import BudgetExhausted, ConfigurationError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.validation.arguments import number

# The share of delta kept for truncated batches and releases that fail, if the plan has some.
FOR_CUTS = 1e-3


class Filter:
    """A Renyi filter: any schedule of steps that it allows is (epsilon, delta)-private, however it was chosen.

    It sums the Renyi divergences of the steps at *one* order alpha, which is fixed in advance, and refuses
    a step that would raise the sum above the B with

        B + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1) = epsilon.

    Then the whole run has divergence at most B at that order (Feldman and Zrnic, "Individual privacy accounting
    via a Renyi filter", 2021). The reason: take the product of the likelihood ratios, each to the power alpha and
    divided by e^((alpha - 1) D_t). It is a supermartingale for any rule that chooses the steps from earlier releases.

    Continuing while any of several orders has budget left would not be sound. The order with the smallest sum then
    depends on the releases, and the supermartingale of each order bounds that order only.

    Args:
        epsilon: the budget.
        delta: its delta.
        order: alpha; by default the best one for `plan`.
        plan: a history like the run to come. It only decides the order.
    """

    def __init__(
        self, epsilon: float, delta: float, order: float | None = None, plan: Sequence[Entry] | None = None
    ) -> None:
        self.epsilon = number("epsilon", epsilon, above=0)
        self.delta = number("delta", delta, above=0, below=1)
        if (order is None) == (plan is None):
            raise ConfigurationError("Give either order or plan: one order must be fixed before the first step.")
        cuts = plan is not None and any(entry.event.excess > 0 for entry in plan)
        self._conversion = rdp.conversion(self.delta * (1 - FOR_CUTS) if cuts else self.delta)
        self._most_excess = self.delta * FOR_CUTS / 2 * math.exp(-self.epsilon) if cuts else 0.0
        self._place = _place_of(order) if plan is None else self._best_for(plan)
        self.history: list[Entry] = []  # the charged events, run-length coded
        self._is_open = False  # whether the last entry grows while steps are alike, as in a ledger

    @property
    def order(self) -> float:
        """alpha."""
        return float(rdp.ORDERS[self._place])

    @property
    def spent(self) -> float:
        """The budget epsilon that the charged events would use up."""
        return max(0.0, self._epsilon(self.history)) if self.history else 0.0

    def allows(self, event: Event, count: int = 1) -> bool:
        """Whether `count` steps of `event` still fit. Charges nothing."""
        after = self._after(event, count)
        # A release that fails costs less than a truncated batch, (1 + e^epsilon) X, and counts as one.
        excess = math.fsum(entry.count * entry.event.excess for entry in after) * (1 + 2.0**-50)
        return self._epsilon(after) <= self.epsilon and excess <= self._most_excess

    def restart(self) -> None:
        """Close the last entry, after a new noise key or another run, so that later steps are not merged with it.

        Call it wherever a shuffled epoch may have been interrupted: each stretch of steps costs ceil(count / period)
        passes.
        """
        self._is_open = False

    def charge(self, event: Event, count: int = 1) -> None:
        """Count `count` steps of `event`, before they are made.

        Consecutive steps that are alike continue the same epoch, if they are shuffled; see `restart`.

        Raises:
            BudgetExhausted: if they do not fit; nothing is counted then. A cheaper step may still fit.
        """
        if event.excess > 0 and self._most_excess == 0:
            raise ConfigurationError(
                "The step may truncate its batch or fail, and the filter's plan has no such step: give one that has."
            )
        if not self.allows(event, count):
            raise BudgetExhausted(
                f"The step would exceed epsilon={self.epsilon:g} at delta={self.delta:g}: do not make it. A step "
                "with more noise or a smaller rate may still fit."
            )
        self.history, self._is_open = self._after(event, count), True

    def _best_for(self, plan: Sequence[Entry]) -> int:
        """The index of the order at which most repetitions of the plan fit."""
        divergences = rdp.divergences(compose(plan))
        if not 0 < divergences.min() < math.inf:
            raise ConfigurationError("plan must hold at least one step, and every step needs noise.")
        return _best_place(divergences, self._conversion, self.epsilon)

    def _after(self, event: Event, count: int) -> list[Entry]:
        further = Entry(event, checked_count("count", count, least=1))
        require_one_guarantee([*self.history[-1:], further])
        if self._is_open and self.history[-1].event == event:
            return [*self.history[:-1], Entry(event, self.history[-1].count + further.count)]
        return [*self.history, further]

    def _epsilon(self, history: Sequence[Entry]) -> float:
        total = math.fsum(divergence_at(self.order, entry) for entry in history)
        return total * (1 + rdp.SLACK) + float(self._conversion[self._place])


def epsilon_at(order: float, history: Sequence[Entry], delta: float, *, budget: float | None = None) -> float:
    """The epsilon of a filter at this order that a history has used up, with 0.1% of delta kept for rare events.

    It holds for steps that were chosen from earlier releases, if `order` was fixed before the first of them. The cost
    of truncation is bounded at `budget`, the epsilon that must not be exceeded, if given; infinity if rare events are
    more probable than the kept share of delta allows.
    """
    total = compose(history)
    if total.is_empty:
        return 0.0
    place = _place_of(order)
    divergence = float(rdp.divergences(total)[place]) * (1 + rdp.SLACK)
    found = max(0.0, divergence + conversion_at(order, delta))
    cut = truncation.added_delta(found if budget is None else max(found, budget), total.excess, total.failure)
    return found if cut <= FOR_CUTS * delta else math.inf


def conversion_at(order: float, delta: float) -> float:
    """The term that `epsilon_at` adds to the divergence."""
    return float(rdp.conversion(delta * (1 - FOR_CUTS))[_place_of(order)])


@lru_cache(maxsize=4096)
def divergence_at(order: float, entry: Entry) -> float:
    """The Renyi divergence of an entry, rounded up."""
    return float(rdp.divergences(compose([entry]))[_place_of(order)])


@lru_cache(maxsize=16)  # runs that share a ledger call it at every step
def best_order(plan: Entry, delta: float, epsilon: float | None = None) -> float:
    """The order to fix for a planned run: at which most such steps fit into epsilon or, without a budget, at which
    these steps cost least. Without noise any order is valid."""
    divergences = rdp.divergences(compose([plan]))
    if not np.isfinite(divergences).any():
        return float(rdp.ORDERS[len(rdp.ORDERS) // 2])
    return float(rdp.ORDERS[_best_place(divergences, rdp.conversion(delta * (1 - FOR_CUTS)), epsilon)])


def _best_place(divergences: Array, conversion: Array, epsilon: float | None) -> int:
    """The index of the order at which most such steps fit into epsilon or, without a budget, at which they cost least.

    An infinite divergence is never the best.
    """
    with np.errstate(invalid="ignore"):
        badness = divergences + conversion if epsilon is None else -(epsilon - conversion) / divergences
    return int(np.argmin(np.where(np.isfinite(divergences), badness, np.inf)))


def order_for_budget(epsilon: float, delta: float) -> float:
    """The order to fix if only the budget is known: the best one for Gaussian mechanisms that use it up."""
    step = Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, noise_multiplier=1.0, sample_rate=1.0)
    return best_order(Entry(step, 1), delta, epsilon)


@lru_cache(maxsize=64)
def _place_of(order: float | None) -> int:
    places = np.flatnonzero(np.isclose(rdp.ORDERS, np.nan if order is None else float(order), rtol=1e-9))
    if len(places) != 1:
        raise ConfigurationError(
            f"order={order!r} is not possible: it must be one of 1.1, 1.2, ..., 10.9, 11, 12, ..., 63, 128, 256, 512, "
            "1024. Give plan to choose the best one."
        )
    return int(places[0])
