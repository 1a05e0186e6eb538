"""Mistakes around a run that break no step and still spoil it: what is refused, and what is warned of.

`checks.py` looks at what a step computes. Here it is about what goes on beside it: other hands on the parameters, a
model left in `.eval()`, a learning rate that follows private metrics, copies of a run.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from clipwise.errors import ConfigurationError, PrivacyWarning
from clipwise.real_views import real_view

if TYPE_CHECKING:
    from clipwise.engine import Private

_LOOKED_AT = 2  # updates after which contents are compared: that costs a pass over the parameters


_RUNS: WeakValueDictionary[int, Private] = (
    WeakValueDictionary()
)  # by the identity of a parameter, which the run holds


def require_alone(run: Private, parameters: Mapping[str, nn.Parameter]) -> None:
    """Warn if another open run trains the same parameters and counts in a ledger of its own."""
    for name, p in parameters.items():
        other = _RUNS.get(id(p))
        if other is not None and not other._closed and other.steps and other._ledger is not run._ledger:
            _warn(
                f"Parameter {name!r} is trained by another private run that is still open. What both release of it "
                "adds up, and neither counts the other: close the first one, or give both the same ledger."
            )
            break
    _RUNS.update({id(p): run for p in parameters.values()})


def require_no_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks on parameters: they would see gradients before the noise, or change them (momentum, decay)."""
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                f"Parameter {name!r} has a hook on its gradient (register_hook). It would see or change gradients "
                "before the noise, and nothing bounds what it does with them. Remove it: momentum, weight decay and "
                "further clipping belong into the optimizer, or on .grad after private.backward."
            )


class Watch:
    """Looks at model and optimizer at every step, and says each thing once.

    Attributes:
        follows_metric: whether the learning rate is set by a scheduler that is fed a metric.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.follows_metric = False
        self._model, self._optimizer = model, optimizer
        self._rates = self._rates_now()
        self._changes = 0
        self._said_mode = self._said_foreign = False
        self._left = self._releases_left = _LOOKED_AT
        self._contents: dict[str, tuple[float, ...]] = {}
        self._at_release: dict[str, tuple[float, ...]] = {}

    def before_step(self) -> bool:
        """Called with the losses of a batch; returns whether there is something new for a statement."""
        if not self._model.training and not self._said_mode:
            self._look_at_mode()
        return self._look_at_rates()

    def released(self) -> None:
        """Called when a released gradient was written, which an update should use."""
        if not self._releases_left or not any(self._rates_now() or [1.0]):  # a warm-up may begin at 0
            return
        self._releases_left -= 1
        if any(p.grad is not None and bool(p.grad.any()) for p in self._model.parameters()):
            self._at_release = self._contents_now()

    def at_batch(self) -> None:
        """Called with the losses of the next batch: the gradient of the last one is written over now."""
        then, self._at_release = self._at_release, {}
        if then and then == self._contents_now():
            self._releases_left = 0
            _warn(
                "No parameter has changed since the last release, so its gradient is lost, and it is counted all the "
                "same: gradients of several batches do not add up in .grad. Call optimizer.step() for each complete "
                "batch, as private.step does. To use more examples in a step give a larger batch_size, and "
                "max_physical_batch_size for what fits into memory."
            )

    def after_update(self) -> None:
        """Called when the optimizer has stepped."""
        if self._left:
            self._left -= 1
            self._contents = self._contents_now()

    def at_draw(self) -> None:
        """Called before the next batch is handed out: since the update nobody should have written to parameters."""
        then, self._contents = self._contents, {}
        if not then or self._said_foreign:
            return
        for name, (identity, *content) in self._contents_now().items():
            same, *before = then.get(name, (None,))  # another object of that name is refused elsewhere
            if same == identity and before != content:
                self._said_foreign = True
                return _warn(
                    f"Parameter {name!r} was changed after private.step by something else than its optimizer: a second "
                    "optimizer, or a line of the loop. That is covered only if it was computed from released values "
                    "or public data. A gradient of private data must go through private.step."
                )

    def forget(self) -> None:
        """After a checkpoint was loaded: parameters may be others."""
        self._contents, self._at_release = {}, {}

    def _look_at_mode(self) -> None:
        for name, module in self._model.named_modules():
            if _is_random_in_training(module):
                self._said_mode = True
                return _warn(
                    f"The model is in .eval(), so layer {name!r} ({type(module).__name__}) drops nothing while it is "
                    "trained. If .eval() was left on after an evaluation, call model.train() before the next step.",
                    depth=7,
                )

    def _look_at_rates(self) -> bool:
        rates = self._rates_now()
        if rates == self._rates or self.follows_metric:
            return False
        self._rates, self._changes = rates, self._changes + 1
        if self._changes & (
            self._changes - 1
        ):  # look at changes 1, 2, 4, 8, ...: each walks over all objects
            return False
        self.follows_metric = any(
            issubclass(type(found), ReduceLROnPlateau) and found.optimizer is self._optimizer
            for found in gc.get_objects()
        )
        if self.follows_metric:
            _warn(
                "The learning rate follows a metric (ReduceLROnPlateau). If that is a loss or an accuracy of the "
                "private data, it is a release that is not accounted: feed the scheduler from public data, or use one "
                "that only counts steps. The privacy statement names it.",
                depth=7,
            )
        return self.follows_metric

    def _rates_now(self) -> list[float]:
        """Numbers only: to read a tensor would wait for its device, and a scheduler that is fed sets numbers."""
        return [g["lr"] for g in self._optimizer.param_groups if isinstance(g.get("lr"), (int, float))]

    def _contents_now(self) -> dict[str, tuple[float, ...]]:
        return {name: (id(p), *_digest(p)) for name, p in self._model.named_parameters() if p.requires_grad}


def _digest(p: Tensor) -> tuple[float, float]:
    """Two numbers that hardly stay what they are when the contents change; the same for a copy put back."""
    values = real_view(p.detach()).double().nan_to_num().flatten()
    return float(values.sum()), float(values.abs().sum())


def _is_random_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # of recurrent and attention layers
    return isinstance(dropout, float) and dropout > 0


def _warn(message: str, depth: int = 5) -> None:
    """Of the line of the user's own code, `depth` calls from here."""
    warnings.warn(message, PrivacyWarning, stacklevel=depth)
