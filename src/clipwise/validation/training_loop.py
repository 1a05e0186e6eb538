"""How a loop uses the gradients that were released, and idioms of plain training that do not go with a private run.

A private run leaves the optimizer to the user. Hooks on its `step` tell an update on released gradients from every
other one: a plain `loss.backward(); optimizer.step()`, a framework that steps by itself, a closure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clipwise.errors import ConfigurationError, StepError

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

_SAMPLED = 32  # entries of each gradient
_NEAR = 1e-5  # relative: rounding of a gradient that was multiplied
_LEAST_SCALE = 128.0  # of a GradScaler, which begins at 65536

DECLARED = ("public", "post-processing")

CLEARED = (
    "optimizer.step() found no gradient: the one that private.backward released was cleared before it was used. It is "
    "counted all the same. Call optimizer.zero_grad() after optimizer.step() or leave it out: private.backward writes "
    "each gradient anew."
)
RESCALED = (
    "Gradients were changed between private.backward and optimizer.step() (clip_grad_norm_, GradScaler.unscale_, a "
    "factor). They are already clipped and noised, so this costs no privacy; it only changes the size of the update. "
    "Leave it out: max_norm of the strategy bounds each example, and lr sets the size of the update."
)
FOREIGN = (
    "private.optimizer was stepped on gradients that private.backward did not write, as in a plain loss.backward(); "
    "optimizer.step() loop. Nothing bounds them and no noise was added. The next batch, spent() and statement() will "
    "raise. If the update came from public data or from released values alone, call "
    "private.declare_update(kind='public' or 'post-processing', reason=...)."
)


def unverified(changed: Sequence[str]) -> str:
    """That the model is not what the run left in it, and what to do."""
    what = (
        f"{changed[0]!r} is not what the last release, or make_private, left in the model"
        + (f" (and {len(changed) - 1} more)" if len(changed) > 1 else "")
        if changed
        else "private.optimizer was stepped on gradients that private.backward did not write"
    )
    return (
        f"{what}. Something else than this run changed it: a plain loss.backward() and optimizer.step(), a second "
        "optimizer, load_state_dict, or a forward pass that updates a buffer (call model.eval() before it). No "
        "statement about the model would be true. If the change came from private data, go back to a checkpoint of "
        "this run: model.load_state_dict(...), then private.load_state_dict(...). If it came from public data or from "
        "released values alone, call private.declare_update(kind='public' or 'post-processing', reason=...): the "
        "statement prints that as your assertion."
    )


class ReleasedGradients:
    """What `private.backward` wrote to `.grad`, and whether an update has used it.

    Attributes:
        is_unused: whether a gradient was released that no update has used.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.is_unused = False
        self._parameters = parameters
        self._written: dict[str, tuple[Tensor, int]] = {}
        self._sample: Tensor | None = None

    def remember(self, keeps_sample: bool = False) -> None:
        """What is in `.grad` now was released. With a sample of it, a multiple can be recognised later."""
        grads = self._grads()
        self._written = {name: (grad, grad._version) for name, grad in grads.items()}
        self._sample = _sample_of(grads) if keeps_sample else None

    def clear(self) -> None:
        """Let `.grad` go: its memory is needed."""
        for p in self._parameters.values():
            p.grad = None
        self._written, self._sample = {}, None

    def is_foreign(self, name: str, grad: Tensor) -> bool:
        """Whether this is not what was written, and not zeros, as `zero_grad(set_to_none=False)` leaves."""
        return not self._is_written(name, grad) and bool(grad.any())

    def foreign(self) -> str | None:
        """The name of a parameter with such a gradient; None if there is none."""
        return next((name for name, grad in self._grads().items() if self.is_foreign(name, grad)), None)

    def require_used(self) -> None:
        """Refuse to write over a released gradient that still waits for its update."""
        if self.is_unused and any(self._is_written(n, g) or bool(g.any()) for n, g in self._grads().items()):
            raise StepError(
                "private.backward was called again before optimizer.step(). Gradients of several batches do not add up "
                "in .grad, and the one there would be lost, though it is counted. Nothing more was released. Call "
                "optimizer.step() for each complete batch, as private.step does. To use more examples in a step give "
                "make_private a larger batch_size, and max_physical_batch_size for what fits into memory. To leave a "
                "released gradient unused, call optimizer.zero_grad()."
            )

    def warning(self) -> str | None:
        """What is wrong with the gradients that an optimizer is about to use; None if nothing is."""
        grads = self._grads()
        if any(self.is_foreign(name, grad) for name, grad in grads.items()) or self._was_written_to(grads):
            return RESCALED if self._is_rescaled(grads) else FOREIGN
        is_there = any(self._is_written(name, grad) for name, grad in grads.items())
        return CLEARED if self.is_unused and not is_there else None

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _is_written(self, name: str, grad: Tensor) -> bool:
        written = self._written.get(name)
        return written is not None and grad is written[0] and grad._version == written[1]

    def _was_written_to(self, grads: Mapping[str, Tensor]) -> bool:
        """Whether gradients were changed in ways that torch does not count; no device is waited for to find out."""
        if self._sample is None or self._sample.device.type != "cpu" or grads.keys() != self._written.keys():
            return False
        is_all_written = all(self._is_written(name, grad) for name, grad in grads.items())
        return is_all_written and not torch.equal(_sample_of(grads), self._sample)

    def _is_rescaled(self, grads: Mapping[str, Tensor]) -> bool:
        """Whether these are the released gradients times one positive number, or clamped to one."""
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


def watch_steps(optimizer: torch.optim.Optimizer, run: StepContext) -> list[RemovableHandle]:
    """Let a run see each step of its optimizer. The optimizer does not hold the run: it may live longer."""
    watching = ref(run)

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (found := watching()) is not None and not found.weights.state.is_updating:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
            found.weights.before_user_step(has_closure=closure is not None)

    def after(*_: object) -> None:
        if (found := watching()) is not None and not found.weights.state.is_updating:
            found.after_user_step()

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def require_one_process() -> None:
    """Refuse to train on several ranks, each of which would train a model of its own and claim for it alone."""
    distributed = torch.distributed
    ranks = 1
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    elif (
        "RANK" in os.environ and os.environ.get("WORLD_SIZE", "").isdecimal()
    ):  # torchrun, before init_process_group
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        raise ConfigurationError(
            f"torch.distributed has {ranks} ranks. A private run on several ranks is not supported yet: each rank "
            "would draw batches and noise of its own, train a model of its own and count its releases alone. Start one "
            "process (python train.py instead of torchrun) on one device; max_physical_batch_size lets large batches "
            "fit into its memory."
        )


def require_no_loss_scaling(losses: Tensor) -> None:
    """Refuse losses that `GradScaler.scale` has multiplied: their last factor is a tensor that holds a power of two."""
    node = losses.grad_fn
    if node is None or node.name() != "MulBackward0":
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.dim() == 0 and not factor.requires_grad:
            value = float(factor)
            if value >= _LEAST_SCALE and value.hex().startswith("0x1.0000000000000p"):
                raise StepError(
                    "losses were multiplied by a large power of two, as torch.amp.GradScaler.scale does. Loss scaling "
                    "is of no use here: each example's gradient is clipped, so the factor only makes all of them "
                    "reach max_norm. Leave the scaler out, call private.step(losses), and use autocast with "
                    "torch.bfloat16, which needs no scaling."
                )


def _sample_of(grads: Mapping[str, Tensor]) -> Tensor:
    """A copy of some entries of each."""
    flat = [grad.detach().reshape(-1) for grad in grads.values()]
    return torch.cat([g[:: max(1, len(g) // _SAMPLED)][:_SAMPLED] for g in flat]) if flat else torch.zeros(0)
