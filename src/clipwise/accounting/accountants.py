"""Computes epsilon or delta of a history: composes it, calls an accountant, adds the cost of rare events.

An accountant is a module with `epsilon(total, delta)` and `delta(total, epsilon)` on a `Composition`, as if no batch
had been truncated and no release had failed. To add one, write the module and list it in `ACCOUNTANTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipwise.accounting import dp_accounting, gdp, pld, rdp, truncation, zcdp
from clipwise.accounting.composition import Composition, compose
from clipwise.errors import UnsupportedEventError
from clipwise.privacy import Entry
from clipwise.validation.arguments import number, one_of

ACCOUNTANTS: dict[str, Any] = {"pld": pld, "rdp": rdp, "zcdp": zcdp, "gdp": gdp, "dp-accounting": dp_accounting}


def epsilon_of(history: Sequence[Entry], delta: float, accountant: str = "pld") -> float:
    """Epsilon at `delta` of a whole history; 0 for an empty one, inf if a release had no noise."""
    return composed_epsilon(compose(history), number("delta", delta, above=0, below=1), accountant)


def delta_of(history: Sequence[Entry], epsilon: float, accountant: str = "pld") -> float:
    """Delta at `epsilon` of a whole history."""
    return composed_delta(compose(history), number("epsilon", epsilon, least=0), accountant)


def composed_epsilon(total: Composition, delta: float, accountant: str = "pld") -> float:
    """`epsilon_of` for a composed history."""
    module = _named(accountant)
    return truncation.epsilon(lambda d: float(module.epsilon(total, d)), delta, total.excess, total.failure)


def composed_delta(total: Composition, epsilon: float, accountant: str = "pld") -> float:
    """`delta_of` for a composed history."""
    untruncated = float(_named(accountant).delta(total, epsilon))
    return min(1.0, untruncated + truncation.added_delta(epsilon, total.excess, total.failure))


def _named(accountant: str) -> Any:
    if isinstance(accountant, str) and accountant == "clt":
        raise UnsupportedEventError(
            "accountant='clt' is not possible: the central limit theorem approximates epsilon and may fall below "
            "the true value, so it is no guarantee. Use 'pld' for a bound; accounting.central_limit(...) gives "
            "the approximation as a diagnostic."
        )
    return ACCOUNTANTS[one_of("accountant", accountant, ACCOUNTANTS)]
