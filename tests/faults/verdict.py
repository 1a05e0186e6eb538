"""Checks after a fault of any kind."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clipwise.ledger.file_format import LEAST_BLOCK
from tests.faults.plan import STEPS, STEPS_AFTER, Plan

DEADLY = ("kill", "power cut")
# Faults that a run survives: nothing is lost, and nothing is counted twice.
HARMLESS = ("two writers", "clock jump", "not finite")
ROUNDING = 1e-4  # a sum in smaller pieces is added in another order


@dataclass(frozen=True)
class Facts:
    """Observations of the two processes of a run.

    Args:
        plan: the run, and its fault.
        end: how the first process ended: an exit code, or minus a signal.
        said: its log.
        position: its ledger's number of releases, before the second process.
        checkpoint: the position in the last checkpoint, if there is one.
        end_after, said_after, position_after, is_clean_after: the same of the second process.
        reference: the weights of a run without a fault, if they must be equal.
    """

    plan: Plan
    end: int
    said: list[str]
    position: int
    checkpoint: int | None
    end_after: int = 0
    said_after: list[str] = field(default_factory=list)
    position_after: int = 0
    is_clean_after: bool = True
    reference: list[Any] | None = None

    @property
    def happened(self) -> bool:
        """Whether the run reached the place of the fault."""
        return "fault" in self.said

    @property
    def seen(self) -> int:
        """Return the number of visible releases."""
        return max(map(self.said.count, ("release", "touch", "update")))

    def numbers(self, word: str, said: Sequence[str] | None = None) -> list[int]:
        lines = self.said if said is None else said
        return [int(line.split()[1]) for line in lines if line.startswith(f"{word} ")]


def broken(facts: Facts) -> list[str]:
    """Return the failed checks."""
    return [
        *_understated(facts),
        *_ended_wrongly(facts),
        *_lost_checkpoint(facts),
        *_same_noise_twice(facts),
        *_not_resumed(facts),
        *_changed_what_it_may_not(facts),
    ]


def _understated(facts: Facts) -> list[str]:
    found = []
    if facts.position < facts.seen:
        found.append(f"the ledger counts {facts.position}, and {facts.seen} releases were seen")
    # The rest of a reservation, a torn line, and a release that was charged and is not visible.
    most = min(facts.plan.block, LEAST_BLOCK)
    if facts.position > facts.seen + (2 if most == 1 else 2 * most + 1):
        found.append(f"the ledger counts {facts.position}, far above the {facts.seen} releases that were seen")
    if facts.checkpoint is not None and facts.checkpoint > facts.position:
        found.append("a checkpoint holds more releases than the ledger")
    return found


def _ended_wrongly(facts: Facts) -> list[str]:
    if _was_reported(facts):
        return []
    found = [line for line in facts.said + facts.said_after if line.startswith("error")]
    if facts.plan.kind in DEADLY and facts.happened and facts.end != -signal.SIGKILL:
        found.append(f"the first process ended with {facts.end}")
    if facts.plan.kind not in DEADLY and facts.end != 0:
        found.append(f"the first process ended with {facts.end}")
    return found


def _was_reported(facts: Facts) -> bool:
    """Torch reports a dead worker from a signal handler: like Ctrl-C, this may end a run at any line."""
    return facts.plan.kind == "worker crash" and any(
        line.startswith("error RuntimeError('DataLoader worker (pid") for line in facts.said
    )


def _lost_checkpoint(facts: Facts) -> list[str]:
    """The checkpoint must be the last saved one, or the one being saved."""
    saved, saving = facts.numbers("saved"), facts.numbers("saving")
    if facts.checkpoint in {saved[-1] if saved else None, saving[-1] if saving else None}:
        return []
    return [f"the checkpoint is at {facts.checkpoint}, neither the old one nor the new one"]


def _same_noise_twice(facts: Facts) -> list[str]:
    """After a failed release a key may be used for the same sum again, never for another sum."""
    met: dict[str, str] = {}
    for line in facts.said + facts.said_after:
        if line.startswith("key "):
            _, key, total = line.split()
            if met.setdefault(key, total) != total:
                return ["the same noise on two sums"]
    return []


def _not_resumed(facts: Facts) -> list[str]:
    if facts.end_after != 0:
        return [f"the second process ended with {facts.end_after}"]
    if len(facts.numbers("opened", facts.said_after)) != 1:
        return ["the second process did not open the ledger"]
    (opened,) = facts.numbers("opened", facts.said_after)
    found: list[str] = []
    if opened < facts.position:
        found.append("the position has shrunk")
    if facts.said_after.count("update") != STEPS_AFTER or facts.position_after != opened + STEPS_AFTER:
        found.append("the second process did not make its steps, or did not count each of them once")
    if not facts.is_clean_after:
        found.append("the second process did not end cleanly")
    return found


def _changed_what_it_may_not(facts: Facts) -> list[str]:
    plan, found = facts.plan, []
    is_retried = plan.kind == "out of memory" and plan.is_compiled and plan.at != "noise"
    if _was_reported(facts) or (plan.kind == "worker crash" and "caught LedgerError" in facts.said):
        return []  # reported during a write: as after Ctrl-C, the ledger must be opened again
    if plan.kind in (*HARMLESS, "worker crash") or is_retried:
        extra = 0
    elif plan.kind == "out of memory":
        extra = int(plan.at == "noise" and facts.happened)  # the charge stays
    else:
        return []
    if "closed" not in facts.said or facts.said.count("update") != STEPS:
        found.append("the run did not live through it")
    if facts.position != STEPS + extra and plan.kind != "worker crash":
        found.append(f"the ledger counts {facts.position} instead of {STEPS + extra}")
    if is_retried and any(line.startswith("caught") for line in facts.said):
        found.append("the run did not retry with smaller pieces")
    weights = [json.loads(line[8:]) for line in facts.said if line.startswith("weights ")][-1:]
    if weights and not _is_finite(weights[0]):
        found.append("weights are not finite")
    if facts.reference is not None and extra == 0 and (not weights or _far(weights[0], facts.reference)):
        found.append("the weights are not those of a run without the fault")
    return found


def _flat(values: Any) -> list[float]:
    return [x for v in values for x in _flat(v)] if isinstance(values, list) else [values]


def _is_finite(values: Any) -> bool:
    return all(abs(x) < float("inf") for x in _flat(values))


def _far(a: Any, b: Any) -> bool:
    return any(abs(x - y) > ROUNDING for x, y in zip(_flat(a), _flat(b), strict=True))
