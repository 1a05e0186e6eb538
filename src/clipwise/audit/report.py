"""Reports of audits: findings on neighbouring runs, and measurements of attacks next to the claim of the run."""

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
    """The guarantee of a history."""

    history: tuple[Entry, ...]
    delta: float

    @cached_property
    def curve(self) -> Tradeoff:
        """Its trade-off curve, which bounds every test."""
        return accounting.tradeoff_of(list(self.history))

    @cached_property
    def epsilon(self) -> float:
        """Its epsilon at delta."""
        return accounting.epsilon_of(list(self.history), self.delta)

    @cached_property
    def mu(self) -> float:
        """The smallest mu for which G_mu - 1e-5 lies nowhere above the curve."""
        return self.curve.mu()


@dataclass(frozen=True)
class Measured:
    """The result of an attack."""

    attack: str
    runs: int  # how many times the model was trained in each world, with and without the canary; 1 for `one_run`
    guesses: int  # "in" or "out"
    right: int
    epsilon: float  # lower bound on epsilon at the claim's delta
    mu: float  # lower bound on the mu of Gaussian differential privacy
    confidence: float  # the probability with which all bounds hold jointly
    exceeds: bool  # whether the claim is ruled out with this confidence

    @property
    def how_often(self) -> str:
        """How many times the model was trained, in words."""
        return "1 run" if self.runs == 1 else f"{self.runs:,} runs with it and {self.runs:,} without"

    @property
    def accuracy(self) -> float:
        """The share of right guesses."""
        return self.right / self.guesses if self.guesses else math.nan


@dataclass(frozen=True)
class AuditReport:
    """A claim and a measurement to compare with it."""

    claim: Claim
    measured: Measured

    @property
    def ok(self) -> bool:
        """Whether the attack stayed within the claim."""
        return not self.measured.exceeds

    def require(self) -> None:
        """Raise an `AuditError` if the claim is ruled out."""
        if not self.ok:
            raise AuditError(str(self))

    def draw(self, path: str | Path) -> None:
        """Plot both trade-off curves: the claimed one, and the largest Gaussian one that is ruled out."""
        plots.tradeoff_curve(self.claim.history, path, measured=self.measured.mu)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types."""
        c = self.claim
        claimed = {"epsilon": c.epsilon, "delta": c.delta, "mu": c.mu, "accuracy": c.curve.accuracy()}
        return {"claimed": claimed, "measured": asdict(self.measured) | {"accuracy": self.measured.accuracy}}

    def __str__(self) -> str:
        m, c = self.measured, self.claim
        too_much = "MORE THAN CLAIMED: the run is less private than its ledger states"
        verdict = "within the claim" if self.ok else too_much
        return (
            f"{m.attack}, {m.how_often}, {m.right} of {m.guesses} guesses right: "
            f"epsilon >= {m.epsilon:.3g} of {c.epsilon:.3g} claimed at delta {c.delta:g}, mu >= {m.mu:.3g} of "
            f"{c.mu:.3g}, confidence {m.confidence:.10g}: {verdict}."
        )


@dataclass(frozen=True)
class Finding:
    """One deviation from the declaration."""

    step: int  # the release, from 1; 0 for the run as a whole
    what: str  # "sensitivity", "joint", "control flow", "state", "noise", "divisor", "key" or "sampling"
    text: str  # the observation, and its likely cause

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step else ""
        return f"{where}{self.what}: {self.text}"


@dataclass
class NeighboursReport:
    """Findings over all pairs of neighbouring data sets that were tried."""

    findings: list[Finding] = field(default_factory=list)
    pairs: int = 0
    steps: int = 0  # how many releases were compared
    moved: int = 0  # how many of them one unit changed at all
    worst: float = 0.0  # the largest change of a release, as a fraction of what its event allows
    history: tuple[Entry, ...] = ()  # the events that a run charges

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing was found."""
        return not self.findings and self.moved > 0

    def require(self) -> None:
        """Raise an `AuditError` unless the run is as declared."""
        if not self.ok:
            raise AuditError(str(self))

    def __str__(self) -> str:
        seen = f"{self.pairs} pairs of neighbours, {self.steps} releases, {self.moved} of them changed by one unit"
        if self.findings:
            lines = [f"Not as declared ({seen}):", *(f"  {finding}" for finding in self.findings[:8])]
            if len(self.findings) > 8:
                lines.append(f"  and {len(self.findings) - 8} more")
            return "\n".join(lines)
        if not self.moved:
            return (
                f"Nothing was compared ({seen}): the unit was never drawn, or changed nothing. Let the run make more "
                "steps, or give another record."
            )
        return f"As declared: {seen}, by at most {self.worst:.4f} of what is allowed."
