"""From a history to a figure, in one place: compose it, ask the accountant by name, add what truncation costs.

An accountant is a module with `epsilon(total, delta)` and `delta(total, epsilon)` on a `Composition`. It bounds
all steps as if no batch had been cut, or refuses them. Cut batches are accounted for here, for all accountants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipwise.accounting import arguments, gdp, pld, rdp, reference, truncation, zcdp
from clipwise.accounting.composition import Composition, compose
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Entry

ACCOUNTANTS: dict[str, Any] = {"pld": pld, "rdp": rdp, "zcdp": zcdp, "gdp": gdp, "dp-accounting": reference}
# Known by name, and refused: what it computes is no bound.
NO_GUARANTEE = "clt"


def epsilon(history: Sequence[Entry], delta: float, accountant: str = "pld") -> float:
    """Epsilon at `delta` of everything in a history; 0 for an empty one, inf if anything had no noise."""
    return epsilon_of(compose(history), delta, accountant)


def delta(history: Sequence[Entry], epsilon: float, accountant: str = "pld") -> float:
    """Delta at `epsilon` of everything in a history."""
    return delta_of(compose(history), epsilon, accountant)


def epsilon_of(total: Composition, delta: float, accountant: str = "pld") -> float:
    """`epsilon` of a history that is already composed."""
    module = named(accountant)
    if total.excess == 0:
        return float(module.epsilon(total, delta))
    return truncation.epsilon(lambda d: float(module.epsilon(total, d)), delta, total.excess)


def delta_of(total: Composition, epsilon: float, accountant: str = "pld") -> float:
    """`delta` of a history that is already composed."""
    untruncated = float(named(accountant).delta(total, epsilon))
    return min(1.0, untruncated + truncation.added_delta(epsilon, total.excess))


def named(accountant: str) -> Any:
    """The accountant of that name, or an error that says which there are."""
    if isinstance(accountant, str) and accountant == NO_GUARANTEE:
        raise UnsupportedEventError(
            "accountant='clt' is not possible: the central limit theorem approximates epsilon and may fall below "
            "the true value, so it is no guarantee. Use 'pld' for a bound; accounting.central_limit(...) gives "
            "the approximation as a diagnostic."
        )
    return ACCOUNTANTS[arguments.one_of("accountant", accountant, ACCOUNTANTS)]
