"""What clipwise raises. A message names the layer or argument, says what is wrong and what to do
instead, and never carries a data value: a refusal is an output too."""

from __future__ import annotations


class ClipwiseError(Exception):
    """Base of every error that clipwise raises on purpose."""


class ConfigurationError(ClipwiseError, ValueError):
    """An argument, or a combination of arguments, that cannot be made private as given."""


class UnsupportedModelError(ClipwiseError):
    """A model or a loss whose per-example gradients cannot be bounded."""


class UnreachedParametersError(UnsupportedModelError):
    """Trainable parameters take no part in the losses.

    Attributes:
        names: of these parameters.
    """

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


class CoupledExamplesError(UnsupportedModelError):
    """One example's loss depends on another example, so clipping examples bounds nothing."""


class StepError(ClipwiseError):
    """The training loop called the engine in an order or with values that it cannot accept."""


class BudgetExhausted(ClipwiseError):  # noqa: N818 (an end that was planned, no mistake)
    """One more step would pass the privacy budget. Nothing was released for that step."""


class LedgerError(ClipwiseError):
    """The ledger cannot be opened, read or continued."""


class LedgerBusyError(LedgerError):
    """Another process writes to this ledger."""


class CheckpointError(ClipwiseError):
    """A checkpoint does not fit the run that loads it."""


class UnsupportedEventError(ClipwiseError):
    """An accountant that has no bound for a kind of event; it refuses instead of guessing."""


class AuditError(ClipwiseError):
    """An audit found that a run promises more privacy than it has."""


class PrivacyWarning(UserWarning):
    """Something that weakens or wastes a guarantee, though it stays true."""
