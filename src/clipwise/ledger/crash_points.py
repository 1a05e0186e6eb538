"""Places where a test may stop the process, to show that a crash there loses nothing that counts."""

from __future__ import annotations

POINTS: tuple[str, ...] = (
    "ledger.before-fsync",  # the reservation is written, perhaps not on disk
    "ledger.after-fsync",  # the reservation is on disk, nothing released yet
    "step.before-grad",  # charged, the noised sum is not computed
    "step.before-update",  # noised, no parameter changed
    "step.during-update",  # some parameters changed
    "checkpoint.during-write",  # a part of the checkpoint is in the file
)


def reached(point: str) -> None:
    """Do nothing: the process has come to `point`, one of `POINTS`.

    A test replaces this function in a process of its own (`faults.reached = killer`) and stops that
    process at the point it wants. So that replacing works, it is called through the module, as in
    `faults.reached("ledger.before-fsync")`.
    """
