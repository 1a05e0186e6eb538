"""Checks between two releases: nothing else may have changed what is released, or learned from the batch."""

from __future__ import annotations

from typing import Any

from clipwise.engine.plan import Plan
from clipwise.errors import StepError
from clipwise.validation import run_guards, step_inputs
from clipwise.validation.inventory import Inventory
from clipwise.validation.training_loop import ReleasedGradients


class RunChecks:
    """What the model, its parameters and its buffers were when a batch was handed out.

    Attributes:
        hands: warns of what is done beside the steps: learning rates from metrics, seeds, a model left in `.eval()`.
        buffers: whether a forward pass has changed a buffer, a parameter or an attribute.
    """

    def __init__(self, plan: Plan, released: ReleasedGradients) -> None:
        self.hands = run_guards.Watch(plan.model, plan.optimizer)
        self.buffers = step_inputs.BufferGuard(plan.model)
        self._parameters, self._strategy, self._released = plan.parameters, plan.strategy, released
        self._named = {name for name, _ in plan.model.named_parameters()}

    def hand_out(self) -> None:
        """Before a batch is handed out."""
        self.hands.draws_from_key = False
        self._require_same_parameters(self.buffers.inventory.up_to_date())

    def remember(self, batch: Any) -> None:
        """A batch is about to be handed out: from here on nothing may learn from it."""
        self.buffers.remember(batch)

    def require_untouched(self) -> None:
        """Nothing but the run may have changed what is released."""
        inventory = self.buffers.inventory.up_to_date()
        if not self._strategy.has_local_update:  # it trains a copy; the model itself is compared below
            for name, module in inventory.statistics:
                step_inputs.require_no_statistics_in(name, module, self._strategy.is_coupled)
        self.buffers.compare_listed()
        run_guards.require_no_hooks(self._parameters)
        self._require_same_parameters(inventory)
        for name, p in self._parameters.items():
            if p.grad is not None and self._released.is_foreign(name, p.grad):
                raise StepError(
                    f"Parameter {name!r} has a gradient that private.backward did not write. If somebody called "
                    "backward() on the losses, leave that out: it is not private. If you changed .grad "
                    "after private.backward, or another private run trains this model too, call "
                    "optimizer.zero_grad() after the update."
                )

    def _require_same_parameters(self, inventory: Inventory) -> None:
        """The model has the parameters that `make_private` found, and trains the same ones."""
        for name, p in inventory.parameters:
            if p.requires_grad and name not in self._named:
                raise StepError(
                    f"Parameter {name!r} came to the model after make_private, and nothing bounds or trains it: build "
                    "the model (and clip its layers) first, then the optimizer, then make a new private run."
                )
            if p.requires_grad != (name in self._parameters):
                raise StepError(
                    f"requires_grad of parameter {name!r} was changed after make_private: make a new private run."
                )
            if p.requires_grad and p is not self._parameters[name]:
                raise StepError(
                    f"Parameter {name!r} was replaced by another object after make_private: make a new private run, "
                    "with an optimizer that holds the new one."
                )
