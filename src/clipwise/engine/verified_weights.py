"""Verified weights: nothing but a release of the run may change the model.

A statement is a claim about the weights that exist. Every change of them since `make_private` must be an update on a
released gradient, or one that the user has declared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from clipwise.engine.plan import Plan
from clipwise.errors import PrivacyWarning, StepError
from clipwise.validation import training_loop
from clipwise.validation.model_state import ModelState
from clipwise.validation.training_loop import ReleasedGradients


class VerifiedWeights:
    """The contents of the model, the released gradients, and what else was done to either.

    Attributes:
        state: every parameter and buffer as the run left it. Runs of one model and one ledger share it.
        released: what was written to `.grad`.
        changed_before: names of what was changed after the run before, which trained the same model.
        has_foreign_step: whether the optimizer was stepped on gradients that were not released.
        averaged: how many updates the averages have of this run.
        is_closed: whether the run is closed.
        unverified: why the weights were not verified when the run was closed.
    """

    def __init__(self, plan: Plan, state: ModelState | None) -> None:
        self.state = ModelState(plan.model) if state is None else state
        self.released = ReleasedGradients(plan.parameters)
        self.released.remember()  # an earlier run may have left a gradient, which nothing uses
        self.changed_before = plan.changed_before
        self.has_foreign_step = self._is_own_step = self.is_closed = False
        self.averaged = 0
        self.unverified: str | None = None
        self._averages = plan.averages
        self._warned: set[str] = set()

    def verify(self, looks_inside: bool = False) -> bool:
        """`require` that nothing was changed. Contents are compared after a counted write, or if `looks_inside`."""
        return self.require(self.state.changed(looks_inside=looks_inside))

    def require(self, changed: Sequence[str]) -> bool:
        """Refuse a model that is not what the run left, given the names of what was changed in it.

        Returns whether it was changed after the run was closed, and not before.
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
        """Leave out parameters that hold the averages of the run: they follow from releases if only it updated them."""
        averages = self._averages
        if not changed or averages is None or not self.averaged or averages.updates != self.averaged:
            return list(changed)
        if not set(changed) <= averages.names_in_model():
            return list(changed)
        if not averages.is_applied:
            self.state.take()  # they were copied into the model for good
        return []

    def accept(self) -> None:
        """The weights as they are now are those of the run."""
        self.changed_before = []
        self.has_foreign_step = self.released.is_unused = False
        self._warned.discard(training_loop.FOREIGN)
        self.state.accept()

    def before_user_step(self, has_closure: bool) -> None:
        """The optimizer is about to step, and the run did not call it."""
        warning = training_loop.FOREIGN if has_closure else self.released.warning()
        is_foreign = warning == training_loop.FOREIGN
        self.has_foreign_step |= is_foreign
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warnings.warn(warning, PrivacyWarning, stacklevel=4)
        self._is_own_step = not is_foreign and not self.state.changed_before_update()

    def after_user_step(self) -> bool:
        """It has stepped. Returns whether that was on released gradients and from verified weights."""
        if self._is_own_step:
            self.released.is_unused = False
        return self._is_own_step

    def close(self) -> None:
        """Verify for the last time, and keep the result."""
        try:
            self.verify(looks_inside=True)
        except StepError as error:
            self.unverified = str(error)
        self.is_closed = True
