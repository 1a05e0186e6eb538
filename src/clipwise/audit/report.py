"""What audits report: findings on neighbouring runs, and what an attack measured beside what the run claims."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
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
    """What an attack has shown."""

    attack: str
    runs: int  # how many times the model was trained in each world, with the canary and without; of `one_run`, 1
    guesses: int  # "in" or "out"
    right: int
    epsilon: float  # lower bound on epsilon at the claim's delta
    mu: float  # lower bound on the mu of Gaussian differential privacy
    confidence: float  # with which all bounds hold together
    exceeds: bool  # whether the claim is ruled out with this confidence

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
        too_much = "MORE THAN CLAIMED: the run is not as private as its ledger says"
        verdict = "within the claim" if self.ok else too_much
        return (
            f"{m.attack}, {m.how_often}, {m.right} of {m.guesses} guesses right: "
            f"epsilon >= {m.epsilon:.3g} of {c.epsilon:.3g} claimed at delta {c.delta:g}, mu >= {m.mu:.3g} of "
            f"{c.mu:.3g}, confidence {m.confidence:.10g}: {verdict}."
        )


@dataclass(frozen=True)
class Finding:
    """One thing that is not as declared."""

    step: int  # the release, from 1; 0 if it is about the run as a whole
    what: str  # "sensitivity", "joint", "control flow", "state", "noise", "divisor", "key" or "sampling"
    text: str  # what was seen, and what to look for

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step else ""
        return f"{where}{self.what}: {self.text}"


@dataclass
class NeighboursReport:
    """What replaying neighbours found, over all pairs of neighbouring data sets that were tried."""

    findings: list[Finding] = field(default_factory=list)  # what is not as declared
    pairs: int = 0
    steps: int = 0  # how many releases were compared
    moved: int = 0  # how many of them one unit moved at all
    worst: float = 0.0  # the largest movement of a release, in units of what its event allows
    history: tuple[Entry, ...] = ()  # what a run charges

    @property
    def ok(self) -> bool:
        """Nothing was found, and there was something to find it in."""
        return not self.findings and self.moved > 0

    def require(self) -> None:
        """Raise an `AuditError` unless all is as declared."""
        if not self.ok:
            raise AuditError(str(self))

    def __str__(self) -> str:
        seen = (
            f"{self.pairs} pairs of neighbours, {self.steps} releases, {self.moved} of them moved by one unit"
        )
        if self.findings:
            lines = [f"Not as declared ({seen}):", *(f"  {finding}" for finding in self.findings[:8])]
            if len(self.findings) > 8:
                lines.append(f"  and {len(self.findings) - 8} more")
            return "\n".join(lines)
        if not self.moved:
            return (
                f"Nothing was compared ({seen}): the unit was never drawn, or moved nothing. Let the run make more "
                "steps, or give another record."
            )
        return f"As declared: {seen}, by at most {self.worst:.4f} of what is allowed."
