"""Points where a test may kill the process, to show that a crash there never loses a charge."""

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

    A test replaces this function in a child process (`crash_points.reached = killer`) to kill it at a point. It must
    therefore be called through the module: `crash_points.reached("ledger.before-fsync")`.
    """
