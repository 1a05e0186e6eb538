"""Errors and warnings of clipwise.

A message names the layer or argument, the problem and the remedy. It never contains data values, because an error
message is an output too.
"""

from __future__ import annotations

import sys
import warnings


class ClipwiseError(Exception):
    """Base class of all clipwise errors."""


class ConfigurationError(ClipwiseError, ValueError):
    """An argument, or a combination of arguments, is invalid or not supported."""


class UnsupportedModelError(ClipwiseError):
    """The per-example gradients of the model or the loss cannot be bounded."""


class UnreachedParametersError(UnsupportedModelError):
    """The losses do not depend on some trainable parameters, listed in `names`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        some = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(
            f"Trainable parameter(s) {some} take no part in the losses, so their private gradient would be pure noise. "
            "Freeze them with requires_grad_(False), or use them in the forward pass; with torch.utils.checkpoint, "
            "pass use_reentrant=False."
        )
        self.names = names


class CoupledExamplesError(UnsupportedModelError):
    """The loss of one example depends on another example, so per-example clipping gives no bound."""


class StepError(ClipwiseError):
    """The training loop called the engine in the wrong order or with invalid values."""


class BudgetExhausted(ClipwiseError):  # noqa: N818 (a planned end, not a failure)
    """One more step would exceed the privacy budget. Nothing was released for that step."""


class LedgerError(ClipwiseError):
    """The ledger cannot be opened, read or continued."""


class LedgerBusyError(LedgerError):
    """Another process has this ledger open for writing."""


class CheckpointError(ClipwiseError):
    """A checkpoint does not match the run that loads it."""


class UnsupportedEventError(ClipwiseError):
    """The accountant has no bound for this kind of event."""


class AuditError(ClipwiseError):
    """An audit found that a run has less privacy than it states."""


class DistributedError(ClipwiseError):
    """Another rank of the run has failed, ended, or is at another place of the training loop."""


class PrivacyWarning(UserWarning):
    """The guarantee still holds, but something weakens it or wastes privacy budget."""


_INSIDE = ("clipwise.", "torch.", "contextlib", "functools")  # modules between the user's code and a warning


def warn(message: str, category: type[Warning] = PrivacyWarning) -> None:
    """Warn at the line of the user's code: the innermost frame outside of clipwise and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
