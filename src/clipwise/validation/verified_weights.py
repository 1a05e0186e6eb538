"""Verified weights: only releases of the run may change the model.

A statement is a claim about the current weights. Every change of them since `make_private` must be an update with a
released gradient, or a change that the user declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clipwise.errors import StepError, warn
from clipwise.gradients.real_views import own_part
from clipwise.validation.inventory import ModelState

if TYPE_CHECKING:
    from clipwise.engine.plan import Plan

_SAMPLED = 32  # entries of each gradient
_NEAR = 1e-5  # relative: rounding of a gradient that was multiplied

CLEARED = (
    "optimizer.step() found no gradient: the one that private.backward released was cleared before it was used. It is "
    "still counted. Call optimizer.zero_grad() after optimizer.step(), or not at all: private.backward overwrites "
    "each gradient."
)
RESCALED = (
    "Gradients were changed between private.backward and optimizer.step() (clip_grad_norm_, GradScaler.unscale_, a "
    "factor). They are already clipped and noised, so a factor that follows from them costs no privacy and changes "
    "only the size of the update. A factor from private data, such as a training loss, is not covered. Remove it: "
    "max_norm of the strategy bounds each example, and lr sets the size of the update."
)
REUSED = (
    "optimizer.step() used a released gradient a second time, which costs no privacy and moves the weights twice. Call "
    "it once for each batch, or not at all after private.step, which has already called it."
)
FOREIGN = (
    "private.optimizer was stepped on gradients that private.backward did not write, as in a plain loss.backward(); "
    "optimizer.step() loop, or after a second loss.backward() for one batch. Nothing bounds them and no noise was "
    "added. The next batch, spent() and statement() will raise. If the update came from public data or from released "
    "values alone, call private.declare_update(kind='public' or 'post-processing', reason=...)."
)


def unverified(changed: Sequence[str]) -> str:
    """Return the message for a model that something else than the run changed."""
    what = "private.optimizer was stepped on gradients that private.backward did not write"
    if changed:
        what = f"{changed[0]!r} is not what the last release, or make_private, left in the model"
        what += f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return (
        f"{what}. Something else than this run changed it: a plain loss.backward() and optimizer.step(), a second "
        "optimizer, load_state_dict, or a forward pass that updates a buffer (call model.eval() before it). No "
        "statement about the model would be true. If the change came from private data, go back to a checkpoint of "
        "this run: model.load_state_dict(...), then private.load_state_dict(...). If it came from public data or from "
        "released values alone, call private.declare_update(kind='public' or 'post-processing', reason=...): the "
        "statement reports it as your assertion."
    )


class ReleasedGradients:
    """The gradients that `private.backward` wrote to `.grad`.

    Attributes:
        is_unused: whether no update has used the last released gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.is_unused = False
        self._parameters = parameters
        self._written: dict[str, tuple[Tensor, int]] = {}
        self._sample: Tensor | None = None

    def remember(self, keeps_sample: bool = False) -> None:
        """Record `.grad` as released. A sample of it allows a multiple to be recognised later."""
        grads = self._grads()
        self._written = {name: (grad, _count(grad)) for name, grad in grads.items()}
        self._sample = _sample_of(grads) if keeps_sample else None

    def clear(self) -> None:
        """Set `.grad` to None to free its memory."""
        for p in self._parameters.values():
            p.grad = None
        self._written, self._sample = {}, None

    def is_foreign(self, name: str, grad: Tensor) -> bool:
        """Whether the run did not write this gradient, and it is not zero (as after `zero_grad(set_to_none=False)`)."""
        return not self._is_written(name, grad) and _is_nonzero(grad)

    def require_own(self) -> None:
        """Raise if `.grad` holds gradients that the run did not write."""
        for name, grad in self._grads().items():
            if self.is_foreign(name, grad):
                raise StepError(
                    f"Parameter {name!r} has a gradient that private.backward did not write. If your code calls "
                    "backward() on the losses, remove that call: it is not private. If you changed .grad after "
                    "private.backward, or another private run trains this model too, call optimizer.zero_grad() "
                    "after the update."
                )

    def require_used(self) -> None:
        """Raise if no update has used the last released gradient: the next one would overwrite it."""
        if self.is_unused and any(self._is_written(n, g) or _is_nonzero(g) for n, g in self._grads().items()):
            raise StepError(
                "private.backward was called again before optimizer.step(). Gradients of several batches are not "
                "accumulated in .grad, so the last one, which is already counted, would be lost. Nothing more was "
                "released. Call optimizer.step() for each complete batch, as private.step does. For more examples per "
                "step, give make_private a larger batch_size, and max_physical_batch_size to fit it into memory. To "
                "discard a released gradient, call optimizer.zero_grad()."
            )

    def warning(self) -> str | None:
        """Return a warning about the gradients that an optimizer is about to use, or None."""
        grads = self._grads()
        is_written_to = self._was_written_to(grads)
        is_changed = is_written_to or any(self.is_foreign(name, grad) for name, grad in grads.items())
        if is_changed and any(map(_is_nonzero, grads.values())):
            return RESCALED if self._is_rescaled(grads) else FOREIGN
        is_there = not is_written_to and any(self._is_written(name, grad) for name, grad in grads.items())
        if self.is_unused:
            return None if is_there else CLEARED
        return REUSED if is_there else None

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _is_written(self, name: str, grad: Tensor) -> bool:
        written = self._written.get(name)
        return written is not None and grad is written[0] and _count(grad) == written[1]

    def _was_written_to(self, grads: Mapping[str, Tensor]) -> bool:
        """Whether gradients changed without torch's count.

        On an accelerator, so as not to synchronise, compares DTensors only: `clip_grad_norm_` changes them uncounted.
        """
        if self._sample is None or grads.keys() != self._written.keys():
            return False
        if self._sample.device.type != "cpu" and all(type(grad) is Tensor for grad in grads.values()):
            return False
        is_all_written = all(self._is_written(name, grad) for name, grad in grads.items())
        return is_all_written and not torch.equal(_sample_of(grads), self._sample)

    def _is_rescaled(self, grads: Mapping[str, Tensor]) -> bool:
        """Whether these are the released gradients times a positive number, or clamped to [-c, c]."""
        if self._sample is None or grads.keys() != self._written.keys():
            return False
        before, after = self._sample.double(), _sample_of(grads).double()
        if before.shape != after.shape:
            return False
        factor, most = (before * after).sum() / before.square().sum(), after.abs().max()
        near = _NEAR * after.abs() + 1e-30
        is_multiple = (factor > 0) & ((factor * before - after).abs() <= near).all()
        is_clamped = ((before.clamp(-most, most) - after).abs() <= near).all()
        return bool(is_multiple | is_clamped)


def _count(grad: Tensor) -> int:
    """How many changes torch has counted: on a DTensor and on its part in this process."""
    return grad._version if type(grad) is Tensor else grad._version + own_part(grad)._version


def _is_nonzero(grad: Tensor) -> bool:
    return bool((grad if type(grad) is Tensor else own_part(grad)).any())


def _sample_of(grads: Mapping[str, Tensor]) -> Tensor:
    own = (grad if type(grad) is Tensor else own_part(grad) for grad in grads.values())
    flat = [grad.detach().reshape(-1) for grad in own]
    return torch.cat([g[:: max(1, len(g) // _SAMPLED)][:_SAMPLED] for g in flat]) if flat else torch.zeros(0)


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
            raise StepError(unverified(changed))
        return False

    def before_draw(self, moves_weights: bool) -> None:
        """Verify before the next batch is drawn. `moves_weights`: the run will change weights before the update."""
        state = self.state
        self.require(state.changed_before_update() if moves_weights else state.changed(at_draw=True))

    def before_step(self, is_last: bool) -> None:
        """Verify before a piece is used, and a last time before the update if it is the last of its batch."""
        self.released.require_own()
        self.released.require_used()
        if is_last:
            self.require(self.state.changed_before_update())
        self.released.clear()

    def without_averages(self, changed: Sequence[str]) -> list[str]:
        """Drop the names of parameters that hold this run's averages, which are post-processing of its releases."""
        averages = self._averages
        if not changed or averages is None or not self.average_updates or averages.updates != self.average_updates:
            return list(changed)
        if not set(changed) <= averages.names_in_model():
            return list(changed)
        if not averages.is_applied:
            self.state.take()  # they were copied into the model permanently
        return []

    def accept(self) -> None:
        """Take the current weights as those of the run."""
        self.changed_before = []
        self.has_foreign_step = self.released.is_unused = False
        self._warned.discard(FOREIGN)
        self.state.accept()

    def before_user_step(self, has_closure: bool, warns: bool = True) -> None:
        """Look at the gradients that the optimizer is about to use. `warns`: no newer run trains these parameters."""
        warning = FOREIGN if has_closure else self.released.warning()
        is_foreign = warning == FOREIGN
        self.has_foreign_step |= is_foreign
        if warns and warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warn(warning)
        self.state.inventory.up_to_date()
        self._is_own_step = not is_foreign and not self.state.changed_before_update()

    def after_user_step(self) -> bool:
        """Whether the user's step used released gradients and started from verified weights."""
        if self._is_own_step:
            self.released.is_unused = False
        return self._is_own_step

    def close(self) -> None:
        try:
            self.verify(looks_inside=True)
        except StepError as error:
            self.unverified = str(error)
        self.is_closed = True
