"""How a run may end without a result."""

from __future__ import annotations

from clipwise.errors import ConfigurationError
from experiments.harness.store import Cell


class OutOfTimeError(Exception):
    """The time is up in the middle of a run. It goes on later, from what it has kept.

    Attributes:
        progress: what can be told of the run so far.
    """

    def __init__(self, progress: Cell | None = None) -> None:
        super().__init__("out of time")
        self.progress: Cell = progress or {}


class MissingDataError(Exception):
    """A data set is not there: that ends the command, and is no result of a run."""

    def __init__(self, reason: ConfigurationError) -> None:
        super().__init__(str(reason))
        self.reason = reason
