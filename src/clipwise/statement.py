"""The privacy statement of a run: what is promised, to whom, and what is not."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clipwise.privacy import Adjacency, Entry, Event, Part, Spent, rounded_up

NOT_COVERED = (
    "data-dependent preprocessing and feature selection",
    "hyper-parameters chosen by looking at the same data",
    "anything printed or logged from private batches, such as the training loss",
    "side channels such as the time a step takes",
)


@dataclass(frozen=True)
class Statement:
    """A privacy statement, for people (`str`) and for machines (`to_dict`)."""

    spent: Spent
    event: Event
    history: tuple[Entry, ...]
    parts: tuple[Part, ...]
    expected_batch_size: float
    strategy: dict[str, Any]
    seeded: bool
    probed: bool
    not_covered: tuple[str, ...] = NOT_COVERED

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        spent = {k: v if isinstance(v, (int, float)) else str(v) for k, v in asdict(self.spent).items()}
        return {
            "spent": spent,
            "event": self.event.to_dict(),
            "history": [{"event": e.event.to_dict(), "count": e.count} for e in self.history],
            "parts": [asdict(p) for p in self.parts],
            "expected_batch_size": self.expected_batch_size,
            "strategy": self.strategy,
            "seeded": self.seeded,
            "independence_probed": self.probed,
            "not_covered": list(self.not_covered),
            "versions": _versions(),
        }

    def __str__(self) -> str:
        s = self.spent
        neighbours = (
            f"one {s.unit} replaced by an empty one (the number of {s.unit}s is public)"
            if s.adjacency is Adjacency.ZERO_OUT
            else f"one {s.unit} replaced by another"
        )
        bounds = ", ".join(f"{p.name}: {p.sensitivity:g}" for p in self.parts[:4])
        counted = any(not p.parameters for p in self.parts)  # then the bounds adapt to what was counted
        released = "the clipped sum and the counts" if counted else "the clipped sum"
        bounds += f" and {len(self.parts) - 4} more parts" if len(self.parts) > 4 else ""
        lines = [
            "Privacy statement",
            f"  guarantee    ({rounded_up(s.epsilon)}, {s.delta:g})-differential privacy of every released model",
            f"  neighbours   {neighbours}",
            *(
                f"  releases     {count} steps, {e.sampling} sampling at rate {e.sample_rate:.6g}, each a Gaussian "
                f"mechanism on {released} with noise multiplier {e.noise_multiplier:.4g}"
                for e, count in self._releases().items()
            ),
            f"  sensitivity  {bounds}"
            + (
                " (of the next step: max_norm adapts to the released counts, and the noise to it)"
                if counted
                else ""
            ),
            f"  divisor      {self.expected_batch_size:g}, a public constant",
            f"  accountant   {s.accountant}",
            f"  not covered  {'; '.join(self.not_covered)}",
            "  assumption   each loss depends on its own example only: "
            + ("probed on the first batches, not proven" if self.probed else "not probed, not proven"),
        ]
        if self.seeded:
            lines.append(
                "  seed         noise and sampling come from a given seed: the guarantee holds only while that "
                "seed is secret, and no changed program uses it on the same data"
            )
        versions = ", ".join(f"{name} {v}" for name, v in _versions().items())
        lines.append(f"  software     {versions}")
        return "\n".join(lines)

    def _releases(self) -> dict[Event, int]:
        """How often each kind of step was taken: more than one if runs have joined or changed."""
        counts: dict[Event, int] = {}
        for entry in self.history or (Entry(self.event, 0),):
            counts[entry.event] = counts.get(entry.event, 0) + entry.count
        return counts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("clipwise", "torch", "numpy", "dp-accounting"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
