"""What a run leaves to an attacker, in a few figures. Each is the most that any attacker can do."""

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
    """The attacker knows all but one unit, and decides from all releases which of two neighbours was used.

    Args:
        power: (rate of false alarms, largest rate of detection at it), one after the other.
        advantage: the largest difference between the two rates.
        accuracy: the largest share of right guesses if both neighbours are equally likely beforehand.
        mu: the smallest mu whose Gaussian trade-off curve, lowered by 1e-5, is nowhere above that of the run: 0 is
            perfect, infinity is "there is none".
        epsilons: (delta, epsilon at it), one after the other.
    """

    power: tuple[tuple[float, float], ...]
    advantage: float
    accuracy: float
    mu: float
    epsilons: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, history: Sequence[Entry], deltas: Sequence[float] = DELTAS) -> Risk:
        """The figures of all releases in a history."""
        curve = accounting.tradeoff_of(history)
        return cls(
            power=tuple((rate, curve.power(rate)) for rate in FALSE_ALARMS),
            advantage=curve.advantage(),
            accuracy=curve.accuracy(0.5),
            mu=curve.mu(),
            epsilons=tuple((delta, accounting.epsilon_of(history, delta)) for delta in deltas),
        )

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {
            "power": [
                {"false_positive_rate": rate, "true_positive_rate": power} for rate, power in self.power
            ],
            "advantage": self.advantage,
            "accuracy_at_even_prior": self.accuracy,
            "mu": self.mu,
            "epsilons": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in self.epsilons],
        }
