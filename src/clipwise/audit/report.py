"""What a run claims beside what an attack measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clipwise import accounting
from clipwise.accounting.tradeoff import Tradeoff
from clipwise.errors import AuditError
from clipwise.privacy import Entry
from clipwise.report import plots


@dataclass(frozen=True)
class Claim:
    """What a history promises."""

    history: tuple[Entry, ...]
    delta: float

    @cached_property
    def curve(self) -> Tradeoff:
        """Its trade-off curve: no test may do better."""
        return accounting.tradeoff_of(list(self.history))

    @cached_property
    def epsilon(self) -> float:
        """Its epsilon at delta."""
        return accounting.epsilon_of(list(self.history), self.delta)

    @cached_property
    def mu(self) -> float:
        """The smallest mu whose curve, lowered by 1e-5, is nowhere above it."""
        return self.curve.mu()


@dataclass(frozen=True)
class Measured:
    """What an attack has shown.

    Args:
        attack: its name.
        runs: how many times the model was trained in each world, with the canary and without; of `one_run`, 1.
        guesses: how many decisions were taken, "in" or "out".
        right: how many of them were right.
        epsilon: lower bound on epsilon at the claim's delta.
        mu: lower bound on the mu of Gaussian differential privacy.
        confidence: with which all bounds hold together.
        exceeds: whether the claim is ruled out with this confidence.
    """

    attack: str
    runs: int
    guesses: int
    right: int
    epsilon: float
    mu: float
    confidence: float
    exceeds: bool

    @property
    def how_often(self) -> str:
        """How often the model was trained, in words."""
        return "1 run" if self.runs == 1 else f"{self.runs:,} runs with it and {self.runs:,} without"

    @property
    def accuracy(self) -> float:
        """The share of right guesses."""
        return self.right / self.guesses if self.guesses else math.nan


@dataclass(frozen=True)
class AuditReport:
    """A claim and what was measured against it."""

    claim: Claim
    measured: Measured

    @property
    def ok(self) -> bool:
        """The attack did not do better than the claim allows."""
        return not self.measured.exceeds

    def require(self) -> None:
        """Raise an `AuditError` if the claim is ruled out."""
        if not self.ok:
            raise AuditError(str(self))

    def draw(self, path: str | Path) -> None:
        """Both trade-off curves in one picture: what is claimed, and the largest Gaussian one that is ruled out."""
        plots.tradeoff_curve(self.claim.history, path, measured=self.measured.mu)

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        c = self.claim
        claimed = {"epsilon": c.epsilon, "delta": c.delta, "mu": c.mu, "accuracy": c.curve.accuracy()}
        return {"claimed": claimed, "measured": asdict(self.measured) | {"accuracy": self.measured.accuracy}}

    def __str__(self) -> str:
        m, c = self.measured, self.claim
        verdict = (
            "within the claim"
            if self.ok
            else "MORE THAN CLAIMED: the run is not as private as its ledger says"
        )
        return (
            f"{m.attack}, {m.how_often}, {m.right} of {m.guesses} guesses right: "
            f"epsilon >= {m.epsilon:.3g} of {c.epsilon:.3g} claimed at delta {c.delta:g}, mu >= {m.mu:.3g} of "
            f"{c.mu:.3g}, confidence {m.confidence:.10g}: {verdict}."
        )
