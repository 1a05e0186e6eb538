"""What a training loop does around the steps of a private run: what is refused, and what is warned of.

A private run leaves the optimizer to the user. Hooks on its `step` distinguish an update on released gradients from
every other one: a plain `loss.backward(); optimizer.step()`, a framework that steps by itself, a closure.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from clipwise.errors import ConfigurationError, PrivacyWarning, StepError
from clipwise.noise.generators import is_seeded_by_hand

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

_RUNS: WeakValueDictionary[int, StepContext] = (
    WeakValueDictionary()
)  # by the id of a parameter, which the run holds
_SAMPLED = 32  # entries of each gradient
_NEAR = 1e-5  # relative: rounding of a gradient that was multiplied
_LEAST_SCALE = 128.0  # of a GradScaler, which begins at 65536
_SOURCES = (
    "",
    "key",
    "torch",
    "seeded",
)  # of random layers' draws, strongest first; none before the first step

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
        """Set `.grad` to None: its memory is needed."""
        for p in self._parameters.values():
            p.grad = None
        self._written, self._sample = {}, None

    def is_foreign(self, name: str, grad: Tensor) -> bool:
        """Whether this is not what was written, and not zeros, as `zero_grad(set_to_none=False)` leaves."""
        return not self._is_written(name, grad) and bool(grad.any())

    def require_own(self) -> None:
        """Refuse gradients that the run did not write."""
        for name, grad in self._grads().items():
            if self.is_foreign(name, grad):
                raise StepError(
                    f"Parameter {name!r} has a gradient that private.backward did not write. If somebody called "
                    "backward() on the losses, leave that out: it is not private. If you changed .grad "
                    "after private.backward, or another private run trains this model too, call "
                    "optimizer.zero_grad() after the update."
                )

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
        """Whether gradients were changed uncounted by torch. Looks at the CPU only, so as not to wait."""
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


def _sample_of(grads: Mapping[str, Tensor]) -> Tensor:
    """A copy of some entries of each."""
    flat = [grad.detach().reshape(-1) for grad in grads.values()]
    return torch.cat([g[:: max(1, len(g) // _SAMPLED)][:_SAMPLED] for g in flat]) if flat else torch.zeros(0)


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


def require_alone(run: StepContext, parameters: Mapping[str, nn.Parameter]) -> StepContext | None:
    """Warn if another open run trains the same parameters and counts in a ledger of its own.

    Returns an open run that trains the same model and counts in the same ledger.
    """
    found = None
    for name, p in parameters.items():
        other = _RUNS.get(id(p))
        if other is None or other.weights.is_closed:
            continue
        if other.ledger is run.ledger:
            found = other if other.model is run.model else found
        elif other.ledger.position:
            _warn(
                f"Parameter {name!r} is trained by another private run that is still open. What both release of it "
                "adds up, and neither counts the other: close the first one, or give both the same ledger.",
                depth=6,
            )
            break
    _RUNS.update({id(p): run for p in parameters.values()})
    return found


def changed_since_last_run(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """The names of what was changed in a model since the run that trained it before, as long as that run exists.

    A model that was built differently since counts as another one, and so does one that no run has changed.
    """
    other = next((run for p in parameters.values() if (run := _RUNS.get(id(p))) is not None), None)
    if other is None or other.model is not model or not other.weights.state.is_of_same_tensors():
        return []
    weights = other.weights
    if not (
        other.ledger.position or weights.has_foreign_step or weights.unverified or weights.changed_before
    ):
        return []
    changed = weights.without_averages(weights.state.changed(looks_inside=True))
    is_same_optimizer = weights.has_foreign_step and other.optimizer is optimizer
    return [*changed, *weights.changed_before, *(["the state of the optimizer"] if is_same_optimizer else [])]


def require_one_process() -> None:
    """Refuse to train on several ranks, each of which would train a model of its own and claim for it alone."""
    distributed = torch.distributed
    ranks = 1
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    elif "RANK" in os.environ and os.environ.get("WORLD_SIZE", "").isdecimal():  # before init_process_group
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


class LoopWarnings:
    """Looks at model and optimizer at every step, and warns of each mistake once.

    Attributes:
        follows_metric: whether the learning rate is set by a scheduler that is fed a metric.
        draws: the weakest source that random layers drew from so far: the run's "key", "torch", or "seeded".
        draws_from_key: whether those of the batch at hand draw from the run's key.
        is_reproducible: whether the run has a given seed and so makes no claim that another seed could spoil.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.follows_metric = self.draws_from_key = self.is_reproducible = False
        self.draws = ""
        self._model, self._optimizer = model, optimizer
        self._devices = {p.device for p in model.parameters()}
        self._looked_at = (False, 0, "torch")
        self._rates = self._rates_now()
        self._rate_changes = 0
        self._warned_of_mode = False

    def before_step(self) -> bool:
        """Called with the losses of a batch; returns whether there is something new for a statement."""
        if not self._model.training and not self._warned_of_mode:
            self._look_at_mode()
        return self._look_at_rates() | self._look_at_draws()

    def _look_at_mode(self) -> None:
        for name, module in self._model.named_modules():
            if _is_random_in_training(module):
                self._warned_of_mode = True
                return _warn(
                    f"The model is in .eval(), so layer {name!r} ({type(module).__name__}) drops nothing while it is "
                    "trained. If .eval() was left on after an evaluation, call model.train() before the next step."
                )

    def _look_at_rates(self) -> bool:
        rates = self._rates_now()
        if rates == self._rates or self.follows_metric:
            return False
        self._rates, self._rate_changes = rates, self._rate_changes + 1
        if self._rate_changes & (
            self._rate_changes - 1
        ):  # changes 1, 2, 4, 8, ...: a look takes milliseconds
            return False
        self.follows_metric = any(map(_is_fed_scheduler, gc.get_referrers(self._optimizer)))
        if self.follows_metric:
            _warn(
                "The learning rate follows a metric (ReduceLROnPlateau). If that is a loss or an accuracy of the "
                "private data, it is a release that is not accounted: feed the scheduler from public data, or use one "
                "that only counts steps. The privacy statement names it."
            )
        return self.follows_metric

    def _look_at_draws(self) -> bool:
        """Whether random layers draw from a weaker source than before; warns of a seed that was set by hand."""
        found = "key" if self.draws_from_key else "torch"
        if found == "torch" and not self.is_reproducible and is_seeded_by_hand(self._devices):
            found = self._seeded_or_torch()
        if _SOURCES.index(found) <= _SOURCES.index(self.draws):
            return False
        self.draws = found
        if found == "seeded":
            _warn(
                "torch's generator was seeded by hand (torch.manual_seed), and the model has random layers, such as "
                "dropout, that draw from it. Which numbers a record gets depends on the records drawn before it, so to "
                "someone who knows that seed the removal of one record shows in the draws of others, and no clip "
                "bounds that. Compute the losses inside `with private.randomness():`, or call torch.seed() after the "
                "first weights are made. The privacy statement names it."
            )
        return True

    def _seeded_or_torch(self) -> str:
        """Whether a random layer draws; looked up again when the model's mode or the seed has changed."""
        now = self._model.training, torch.initial_seed()
        if now != self._looked_at[:2]:
            is_random = any(m.training and _is_random_in_training(m) for m in self._model.modules())
            self._looked_at = (*now, "seeded" if is_random else "torch")
        return self._looked_at[2]

    def _rates_now(self) -> list[float]:
        """Numbers only: to read a tensor would wait for its device, and a scheduler that is fed sets numbers."""
        return [g["lr"] for g in self._optimizer.param_groups if isinstance(g.get("lr"), (int, float))]


def _is_fed_scheduler(holder: object) -> bool:
    """Whether this is a ReduceLROnPlateau, or the dictionary of its attributes."""
    return isinstance(holder, ReduceLROnPlateau) or (isinstance(holder, dict) and "num_bad_epochs" in holder)


def _is_random_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # of recurrent and attention layers
    return isinstance(dropout, float) and dropout > 0


def _warn(message: str, depth: int = 7) -> None:
    """Of the line of the user's own code, `depth` calls from here."""
    warnings.warn(message, PrivacyWarning, stacklevel=depth)
