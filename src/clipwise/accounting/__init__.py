"""What a run costs, without training anything: epsilon, delta, and the noise for a budget.

Events are data (`clipwise.privacy.Event`); accountants interpret them. An event that an accountant cannot
bound is refused. Every figure is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

from clipwise.accounting import calibrate, pld, rdp
from clipwise.errors import ConfigurationError
from clipwise.privacy import SUPPORTED, Adjacency, Entry, Event, Sampling, Unit

__all__ = ["delta", "delta_of", "epsilon", "epsilon_of", "noise_multiplier", "steps_within"]

_ACCOUNTANTS: dict[str, ModuleType] = {"pld": pld, "rdp": rdp}


def epsilon(
    *,
    noise_multiplier: float,
    steps: int,
    delta: float,
    sample_rate: float | None = None,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
    accountant: str = "pld",
) -> float:
    """The epsilon at `delta` of `steps` private steps.

    Args:
        noise_multiplier: noise over sensitivity *under the adjacency* (2C for a clipped sum under replace-one).
        steps: how many.
        delta: the delta of the guarantee.
        sample_rate: the probability that a record is in a batch; not needed for "full".
        sampling: "poisson", "fixed-size", "partition", "shuffled" or "full".
        adjacency: by default the one that the scheme goes with.
        period: for "shuffled", the steps of an epoch; by default 1 / sample_rate.
        accountant: "pld" (tight) or "rdp" (cheap).
    """
    event = _event(noise_multiplier, sample_rate, sampling, adjacency, period)
    return epsilon_of([Entry(event, _steps(steps))], delta, accountant)


def delta(
    *,
    epsilon: float,
    noise_multiplier: float,
    steps: int,
    sample_rate: float | None = None,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
    accountant: str = "pld",
) -> float:
    """The delta at `epsilon` of `steps` private steps; arguments as in `epsilon`."""
    event = _event(noise_multiplier, sample_rate, sampling, adjacency, period)
    return delta_of([Entry(event, _steps(steps))], epsilon, accountant)


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    sample_rate: float | None = None,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    period: int | None = None,
) -> float:
    """The smallest noise multiplier with which `steps` steps stay within (epsilon, delta), by PLD."""
    event = _event(1.0, sample_rate, sampling, adjacency, period)
    return calibrate.smallest_noise(event, _steps(steps), _epsilon(epsilon), _delta(delta))


def epsilon_of(history: Sequence[Entry], delta: float, accountant: str = "pld") -> float:
    """The epsilon at `delta` of a history of releases."""
    figure: float = _accountant(accountant).epsilon(history, _delta(delta))
    return figure


def delta_of(history: Sequence[Entry], epsilon: float, accountant: str = "pld") -> float:
    """The delta at `epsilon` of a history of releases."""
    figure: float = _accountant(accountant).delta(history, _epsilon(epsilon, least=0))
    return figure


def steps_within(history: Sequence[Entry], event: Event, epsilon: float, delta: float, at_most: int) -> int:
    """How many more steps of `event`, up to `at_most`, stay within (epsilon, delta) after `history`."""
    return calibrate.steps_within(history, event, _epsilon(epsilon), _delta(delta), at_most)


def _event(
    noise: float,
    sample_rate: float | None,
    sampling: str | Sampling,
    adjacency: str | Adjacency | None,
    period: int | None,
) -> Event:
    scheme = _one_of("sampling", sampling, Sampling)
    relation = SUPPORTED[scheme][0] if adjacency is None else _one_of("adjacency", adjacency, Adjacency)
    if not _is_number(noise) or not 0 <= noise < math.inf:
        raise ConfigurationError(f"noise_multiplier must be a finite number >= 0, not {noise!r}.")
    if scheme is Sampling.FULL:
        sample_rate = 1.0
    if scheme is Sampling.SHUFFLED and sample_rate is None and period:
        sample_rate = 1 / period
    if sample_rate is None or not _is_number(sample_rate) or not 0 < sample_rate <= 1:
        raise ConfigurationError(f"sample_rate must lie in (0, 1], not {sample_rate!r}.")
    if scheme is not Sampling.SHUFFLED:
        period = 1
    elif period is None:
        period = math.ceil(1 / sample_rate - 1e-9)
    return Event(scheme, relation, Unit.RECORD, float(noise), float(sample_rate), period)


def _one_of(argument: str, value: object, kind: type[Sampling] | type[Adjacency]) -> Sampling | Adjacency:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(str(k)) for k in kind)
        raise ConfigurationError(f"{argument}={value!r} is not known: use one of {known}.") from None


def _accountant(name: str) -> ModuleType:
    if name not in _ACCOUNTANTS:
        known = ", ".join(map(repr, _ACCOUNTANTS))
        raise ConfigurationError(f"accountant={name!r} is not known: use one of {known}.")
    return _ACCOUNTANTS[name]


def _steps(steps: int) -> int:
    if not _is_number(steps) or steps != int(steps) or steps < 0:
        raise ConfigurationError(f"steps must be a whole number >= 0, not {steps!r}.")
    return int(steps)


def _delta(delta: float) -> float:
    if not _is_number(delta) or not 0 < delta < 1:
        raise ConfigurationError(f"delta must lie in (0, 1), not {delta!r}.")
    return float(delta)


def _epsilon(epsilon: float, least: float = 1e-12) -> float:
    if not _is_number(epsilon) or not least <= epsilon < math.inf:
        raise ConfigurationError(f"epsilon must be a positive, finite number, not {epsilon!r}.")
    return float(epsilon)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
