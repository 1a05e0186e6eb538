"""A fault, its place and its run, determined by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from clipwise.ledger import crash_points

STEPS, SAVE_EVERY, STEPS_AFTER = 12, 3, 4  # of the first process, between checkpoints, of the second process

# How often a point is reached in the first process, with blocks of one release. The fifth checkpoint is the resume
# file.
REACHED = {"checkpoint.during-write": STEPS // SAVE_EVERY + 1}
RESERVATIONS = 5  # with growing blocks: of 1, 2, 4, 4 and 4 releases


@dataclass(frozen=True)
class Plan:
    """One run and its fault.

    Args:
        kind: the fault, one of `KINDS`.
        at: a point of `clipwise.ledger.crash_points`, "line" for any line of the ledger's code, or a
            place of this kind only.
        turn: the visit of the place at which it happens; for "line", the share (in thousandths) of all lines.
        share: the share of unsynced data left after a power cut, or of a line that is written.
        block: the most releases that the ledger reserves at once.
        sampling: the scheme of the run.
        physical: the largest physical batch.
        is_compiled: whether the run uses `private.compiled`.
    """

    kind: str
    at: str
    turn: int
    share: float = 1.0
    block: int = 1
    sampling: str = "poisson"
    physical: int | None = None
    is_compiled: bool = False
    planted: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.at}, turn {self.turn} ({self.sampling}, blocks of {self.block})"


# Relative frequencies. A crash of a worker costs a second, and two are enough.
KINDS = {
    "kill": 22,
    "power cut": 18,
    "ctrl-c": 22,
    "full disk": 14,
    "read-only ledger": 5,
    "two writers": 5,
    "clock jump": 3,
    "not finite": 4,
    "out of memory": 6,
    "worker crash": 1,
}
# Faults that must not change the result: a seeded run is compared with one without a fault.
COMPARED = ("clock jump", "two writers", "out of memory")
_PLACES: dict[str, tuple[str, ...]] = {
    "kill": (*crash_points.POINTS, "line", "line"),
    "power cut": crash_points.POINTS,
    "ctrl-c": (*crash_points.POINTS, "line", "line", "line", "line"),
    "full disk": ("ledger.before-fsync", "ledger.after-fsync", "checkpoint.during-write", "limit", "limit"),
    "read-only ledger": ("open", "write"),
    "two writers": crash_points.POINTS,
    "clock jump": ("step.before-grad",),
    "not finite": ("nan", "inf", "-inf", "huge"),
    "out of memory": ("forward", "clip", "noise"),
    "worker crash": ("fetch",),
}


def plans(seed: int) -> Iterator[Plan]:
    """Yield plans without end: first every kind once, then with the frequencies of `KINDS`."""
    dice = random.Random(seed)
    yield from (_plan(kind, dice) for kind in KINDS)
    while True:
        yield _plan(dice.choices(list(KINDS), list(KINDS.values()))[0], dice)


def _plan(kind: str, dice: random.Random) -> Plan:
    at, block = dice.choice(_PLACES[kind]), dice.choice((1, 1, 64))
    most = REACHED.get(at, STEPS)
    if at.startswith("ledger.") and block > 1:
        most = RESERVATIONS
    if at == "line":
        most = 1000
    return Plan(
        kind=kind,
        at=at,
        turn=dice.randint(1, most),
        share=dice.choice((0.0, 0.5, 0.98, dice.random())),
        block=block,
        sampling=dice.choice(("poisson", "shuffled", "fixed-size")),
        physical=dice.choice((None, None, 2)),
        is_compiled=dice.random() < (0.7 if kind == "out of memory" else 0.2),
    )
