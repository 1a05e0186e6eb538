"""Verified weights: only releases of the run may change the model.

A statement is a claim about the current weights. Every change of them since `make_private` must be an update with a
released gradient, or a change that the user declared.
"""

from __future__ import annotations

from collections.abc import Sequence

from clipwise.engine.plan import Plan
from clipwise.errors import StepError, warn
from clipwise.validation import training_loop
from clipwise.validation.model_state import ModelState
from clipwise.validation.training_loop import ReleasedGradients


class VerifiedWeights:
    """The contents of the model, the released gradients, and changes made by other code.

    Attributes:
        state: every parameter and buffer as the run left it. Runs of one model and one ledger share it.
        released: the gradients written to `.grad`.
        changed_before: names of tensors changed between an earlier run of the same model and this one.
        has_foreign_step: whether the optimizer stepped on gradients that were not released.
        average_updates: the number of updates that the averages took from this run.
        is_closed: whether the run is closed.
        unverified: the reason why verification failed when the run was closed.
    """

    def __init__(self, plan: Plan, state: ModelState | None) -> None:
        stored = plan.layout.stored_tensor if plan.layout.is_sharded else None
        self.state = ModelState(plan.model, stored) if state is None else state
        self.released = ReleasedGradients(plan.parameters)
        self.released.remember()  # an earlier run may have left a gradient, which is not used
        self.changed_before = plan.changed_before
        self.has_foreign_step = self._is_own_step = self.is_closed = False
        self.average_updates = 0
        self.unverified: str | None = None
        self._averages = plan.averages
        self._warned: set[str] = set()

    def verify(self, looks_inside: bool = False) -> bool:
        """`require` an unchanged model. Compares contents if version counters changed, or if `looks_inside`."""
        return self.require(self.state.changed(looks_inside=looks_inside))

    def require(self, changed: Sequence[str]) -> bool:
        """Raise if the model was changed other than by the run; `changed` holds the names of changed tensors.

        Returns whether it was changed only after the run was closed.
        """
        if self.is_closed:
            if self.unverified is not None:
                raise StepError(self.unverified)
            return bool(changed)
        changed = self.without_averages(changed) + self.changed_before if changed else self.changed_before
        if changed or self.has_foreign_step:
            raise StepError(training_loop.unverified(changed))
        return False

    def without_averages(self, changed: Sequence[str]) -> list[str]:
        """Drop the names of parameters that hold this run's averages, which are post-processing of its releases."""
        averages = self._averages
        if not changed or averages is None or not self.average_updates or averages.updates != self.average_updates:
            return list(changed)
        if not set(changed) <= averages.names_in_model():
            return list(changed)
        if not averages.is_applied:
            self.state.take()  # they were copied into the model for good
        return []

    def accept(self) -> None:
        """Take the current weights as those of the run."""
        self.changed_before = []
        self.has_foreign_step = self.released.is_unused = False
        self._warned.discard(training_loop.FOREIGN)
        self.state.accept()

    def before_user_step(self, has_closure: bool) -> None:
        """Called before the user's own call of `optimizer.step()`."""
        warning = training_loop.FOREIGN if has_closure else self.released.warning()
        is_foreign = warning == training_loop.FOREIGN
        self.has_foreign_step |= is_foreign
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warn(warning)
        self._is_own_step = not is_foreign and not self.state.changed_before_update()

    def after_user_step(self) -> bool:
        """Called after it. Returns whether it used released gradients and started from verified weights."""
        if self._is_own_step:
            self.released.is_unused = False
        return self._is_own_step

    def close(self) -> None:
        """Verify a last time and keep the result."""
        try:
            self.verify(looks_inside=True)
        except StepError as error:
            self.unverified = str(error)
        self.is_closed = True
