"""What a check of neighbouring runs found."""

from __future__ import annotations

from dataclasses import dataclass, field

from clipwise.errors import AuditError
from clipwise.privacy import Entry


@dataclass(frozen=True)
class Finding:
    """One thing that is not as declared.

    Args:
        step: the release, from 1; 0 if it is about the run as a whole.
        what: a short name: "sensitivity", "joint", "control flow", "state", "noise", "divisor", "key" or "sampling".
        text: what was seen, and what to look for.
    """

    step: int
    what: str
    text: str

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step else ""
        return f"{where}{self.what}: {self.text}"


@dataclass
class NeighboursReport:
    """What replaying neighbours found, over all pairs that were tried.

    Attributes:
        findings: what is not as declared; empty if all is.
        pairs: how many pairs of neighbouring data sets were compared.
        steps: how many releases were compared, over all pairs.
        moved: how many of them one unit moved at all.
        worst: the largest movement of a release, in units of what its event allows: 1 is just allowed.
        history: what a run charges.
    """

    findings: list[Finding] = field(default_factory=list)
    pairs: int = 0
    steps: int = 0
    moved: int = 0
    worst: float = 0.0
    history: tuple[Entry, ...] = ()

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
