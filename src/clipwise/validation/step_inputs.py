"""What is refused, and why. No message carries a data value."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.gradients.real_views import real_view
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation import run_guards
from clipwise.validation.coupling import PAIRS, USE_BATCH
from clipwise.validation.inventory import Inventory
from clipwise.validation.marked import tracked
from clipwise.validation.plain_state import PlainState

_PROBED_BATCHES = 2
_PLAIN_BATCHES = 8  # a count that follows the data may advance by the same amount on two of them
_CHANGED = (
    "was set or changed between the draw of a batch and private.step, as in a forward pass that learns. What it "
    "learned from private data would leave with the model without any noise. Set it before the first batch, from "
    "public data; update parameters before the next batch is drawn; what forward computes for the loss, let it return."
)
_FIRST_PASS = (
    "(What a first forward pass sets once: let the model run on synthetic rows before make_private. A count of forward "
    "passes may stay, if it advances by the same number each time.)"
)


def trainable_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters to train privately, which are those of the model and of the optimizer alike."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "optimizer is LBFGS, which asks for several gradients of one batch a step: use SGD, Adam or another "
            "that takes one."
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    known = {id(p) for p in model.parameters()}
    held = set()
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in known:
                raise ConfigurationError(
                    f"optimizer holds a parameter of shape {tuple(p.shape)} (group {number}) that the model "
                    "does not: build the optimizer from this model's parameters, after all changes to it."
                )
            held.add(id(p))
    forgotten = [name for name, p in trainable.items() if id(p) not in held]
    if forgotten:
        raise ConfigurationError(
            f"Parameter {forgotten[0]!r} is trainable but the optimizer does not hold it: add it to the "
            "optimizer, or freeze it with requires_grad_(False)."
        )
    run_guards.require_no_hooks(trainable)
    return trainable


def require_real(parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
    """Refuse complex parameters, for a strategy that does not know them."""
    for name, p in parameters.items():
        if p.is_complex():
            raise ConfigurationError(
                f"Parameter {name!r} is {p.dtype}, and clipping={strategy} is for real parameters. Keep it as pairs of "
                "real numbers and call torch.view_as_complex in forward, or use PerExample or Batch without sparse."
            )


_LEARNED = (
    "What it has learned from private data so far must not leave with the model: call reset_running_stats() on it, or "
    "load statistics from before."
)


def require_no_batch_statistics(model: nn.Module, is_coupled: bool = False) -> None:
    """Refuse layers that keep statistics of private data, or that mix the examples of a batch if that is not bounded.

    `is_coupled` says that it is: that mini-sets are clipped as a whole.
    """
    for name, module in model.named_modules():
        require_no_statistics_in(name, module, is_coupled)


def require_no_statistics_in(name: str, module: nn.Module, is_coupled: bool = False) -> None:
    """The same of a single layer."""
    kind = type(module).__name__
    if isinstance(module, ReleasedStatisticsNorm):
        return  # its statistics are constants that follow from releases
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if is_coupled:
            _require_no_running_statistics(name, module)
            return
        if module.training:
            raise UnsupportedModelError(
                f"Layer {name!r} ({kind}) is in training mode: it mixes the examples of a batch, so one record moves "
                "every clipped gradient, and its running statistics leak. Replace it by GroupNorm, LayerNorm or a "
                "layer with public statistics (clipwise.layers.replace_batchnorm does), or freeze its statistics with "
                f".eval(). {_LEARNED} {USE_BATCH}."
            )
        if module.running_mean is None or _has_no_statistics(module):
            raise UnsupportedModelError(
                f"Layer {name!r} ({kind}) keeps no running statistics, so it mixes the examples of a batch even in "
                f".eval(). Replace it by GroupNorm or LayerNorm (clipwise.layers.replace_batchnorm does). {USE_BATCH}."
            )
    keeps = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
    if keeps and module.training:
        raise UnsupportedModelError(
            f"Layer {name!r} ({kind}) keeps running statistics of private data. "
            f"Build it with track_running_stats=False, or freeze it with .eval(). {_LEARNED}"
        )


def _has_no_statistics(module: nn.Module) -> bool:
    return isinstance(module, BatchStatisticsNorm) and not module.has_statistics


def _require_no_running_statistics(name: str, module: nn.modules.batchnorm._BatchNorm) -> None:
    """Statistics of the batch may be used: the clip bounds what comes of them. To keep them is no part of that.

    A layer of torch's that keeps none fails on a draw of one record, and its message tells the size drawn.
    """
    if isinstance(module, BatchStatisticsNorm) or not (module.training or module.running_mean is None):
        return
    trouble = (
        "would fail on a mini-set of one record, which a random draw may bring"
        if module.running_mean is None
        else "would update running statistics from private data, and they would leave with the model without any noise"
    )
    raise UnsupportedModelError(
        f"Layer {name!r} ({type(module).__name__}) {trouble}. Call "
        "clipwise.layers.without_running_statistics(model) before make_private: the layer then uses the statistics of "
        "each batch. For evaluation, Batch(..., running_statistics=NoisedStatistics()) learns them from noised "
        "releases, and clipwise.layers.recompute_statistics(model, public_batches) sets them from public data."
    )


def require_losses(losses: object, size: int, is_coupled: bool = False) -> Tensor:
    """One loss an example, attached to a graph. The size drawn is secret and not in the messages.

    Where mini-sets are clipped as a whole, a single number will do. Of a mini-set without examples it says nothing.
    """
    if not isinstance(losses, Tensor):
        raise StepError(f"losses must be a tensor with one loss an example, not {type(losses).__name__}.")
    losses = tracked(losses)
    if is_coupled and size == 0 and (losses.dim() == 0 or losses.shape == (0,)):
        return torch.zeros(0)  # whatever it is, and of whatever type: no example is in it
    if losses.dim() == 0 and not is_coupled:
        raise StepError(
            "losses is a single number, so the examples can no longer be told apart. Give one loss an "
            "example: use reduction='none' and no mean or sum over the batch."
        )
    if losses.shape == (size, size) and size > 1:
        raise StepError(
            f"{PAIRS} If the second dimension counts positions, as many as there are examples, sum or average it."
        )
    if losses.dim() > 1:
        raise StepError(
            f"losses has {losses.dim()} dimensions. Give one loss an example: first make sure that outputs and targets "
            "have the same shape, then sum or average each example's own positions, as in losses.flatten(1).sum(1)."
        )
    if losses.dim() == 1 and len(losses) != size:
        raise StepError(
            "losses does not have one entry for each example of the batch that private.loader handed out. "
            "Do not drop, repeat or pool examples."
        )
    if not losses.is_floating_point():
        raise StepError(f"losses is {losses.dtype}: it must be real floating point.")
    if not losses.requires_grad:
        raise StepError(
            "losses carries no gradient: compute it from the model's output, with gradients enabled "
            "(no torch.no_grad, no .detach())."
        )
    return losses


def require_empty(size: int) -> None:
    """Losses may be left out for an empty batch only: no batch is skipped because of what it holds."""
    if size:
        raise StepError(
            "losses is None, and the batch that private.loader handed out last is not empty. Give one loss an example: "
            "only an empty batch needs none."
        )


def require_rows(batch: object, size: int) -> None:
    """The batch given to a compiled step must be the one that was handed out. Its size is secret."""
    rows = {len(t) for t in tensors_in(batch) if t.dim()}
    if rows != {size}:
        raise StepError(
            "step(*batch) takes the batch that private.loader handed out last: tensors whose first dimension "
            "counts its examples. Do not drop, repeat or pool examples, and put nothing else into it."
        )


class BufferGuard:
    """Nothing that a buffer, a parameter or an attribute learned in a forward pass may leave with the model."""

    def __init__(self, model: nn.Module) -> None:
        self.inventory = Inventory(model)
        self._versions: dict[str, tuple[object, ...]] = {}
        self._held: list[Tensor] = []  # while they are, no other tensor gets their identity
        self._left = _PROBED_BATCHES  # batches on which contents are looked at: `.data` changes no version
        self._plain, self._plain_left = PlainState(), _PLAIN_BATCHES

    def remember(self, batch: object = None) -> None:
        """Called when a batch is handed out."""
        self.inventory.up_to_date()
        self._versions, self._held = self._now()
        if self._plain_left:
            self._plain.remember(self.inventory.modules, {len(t) for t in tensors_in(batch) if t.dim()})

    def compare(self) -> None:
        """Called when its losses come back."""
        self.inventory.up_to_date()
        self.compare_listed()

    def compare_listed(self) -> None:
        """The same, for who has brought the inventory up to date."""
        now, held = self._now()
        if now != self._versions:
            for name, version in now.items():
                if self._versions.get(name) != version:
                    raise UnsupportedModelError(f"{name} {_CHANGED}")
        if self._plain_left:
            if (changed := self._plain.changed(self.inventory.modules)) is not None:
                raise UnsupportedModelError(f"Attribute {changed!r} {_CHANGED} {_FIRST_PASS}")
            self._plain_left -= 1
        if self._left:
            self._left -= 1
            now, held = self._now()  # contents may be looked at no longer
        self._versions, self._held = now, held

    def _now(self) -> tuple[dict[str, tuple[object, ...]], list[Tensor]]:
        found = [
            (name, t) for name, tensors, key in self.inventory.tensors if (t := tensors[key]) is not None
        ]
        versions: dict[str, tuple[object, ...]]
        if self._left:
            versions = {name: (id(t), t._version, *_digest(t)) for name, t in found}
        else:
            versions = {name: (id(t), t._version) for name, t in found}
        return versions, [t for _, t in found]


def _digest(tensor: Tensor) -> tuple[float, ...]:
    """Numbers that hardly stay what they are when the contents change."""
    if is_lazy(tensor):
        return ()
    values = real_view(tensor.detach()).double().nan_to_num()
    return float(values.sum()), float(values.abs().sum())
