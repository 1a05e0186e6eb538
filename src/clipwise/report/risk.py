"""Upper bounds on membership attacks against a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clipwise import accounting
from clipwise.privacy import Entry

FALSE_ALARMS = (0.001, 0.01, 0.1)
DELTAS = (1e-3, 1e-5, 1e-7)


@dataclass(frozen=True)
class Risk:
    """Bounds for an attacker that knows all but one unit and tests, from all releases, which neighbour was used.

    Args:
        power: pairs (false-positive rate, largest true-positive rate).
        advantage: the largest difference between the true- and the false-positive rate.
        accuracy: the largest accuracy if both neighbours are equally likely a priori.
        mu: the smallest mu such that the Gaussian trade-off curve G_mu, lowered by 1e-5, is nowhere above the curve of
            the run; infinity if there is none.
        epsilons: pairs (delta, epsilon).
    """

    power: tuple[tuple[float, float], ...]
    advantage: float
    accuracy: float
    mu: float
    epsilons: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, history: Sequence[Entry], deltas: Sequence[float] = DELTAS) -> Risk:
        """The bounds for all releases in a history."""
        curve = accounting.tradeoff_of(history)
        return cls(
            power=tuple((rate, curve.power(rate)) for rate in FALSE_ALARMS),
            advantage=curve.advantage(),
            accuracy=curve.accuracy(0.5),
            mu=curve.mu(),
            epsilons=tuple((delta, accounting.epsilon_of(history, delta)) for delta in deltas),
        )

    def to_dict(self) -> dict[str, Any]:
        """The bounds in JSON types."""
        return {
            "power": [{"false_positive_rate": rate, "true_positive_rate": power} for rate, power in self.power],
            "advantage": self.advantage,
            "accuracy_at_even_prior": self.accuracy,
            "mu": self.mu,
            "epsilons": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in self.epsilons],
        }
