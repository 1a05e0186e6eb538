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
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from clipwise.errors import ConfigurationError, PrivacyWarning
from clipwise.noise.generators import is_seeded_by_hand

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

# Of random layers' draws, from the strongest to the weakest; none before the first step.
_SOURCES = ("", "key", "torch", "seeded")
_RUNS: WeakValueDictionary[int, StepContext] = (
    WeakValueDictionary()
)  # by the identity of a parameter, which the run holds


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
    """What was changed in a model after a run that trained it, as long as that run exists: a new one begins from it.

    A model that was built differently since is another one. So is one that was only looked at.
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
        draws: the weakest source that random layers drew from so far: the run's "key", "torch", or "seeded".
        draws_from_key: whether those of the batch at hand draw from the run's key.
        is_reproducible: whether the run has a given seed and so makes no claim that another seed could spoil.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.follows_metric = self.draws_from_key = self.is_reproducible = False
        self.draws = ""
        self._looked_at = (False, 0, "torch")
        self._devices = {p.device for p in model.parameters()}
        self._model, self._optimizer = model, optimizer
        self._rates = self._rates_now()
        self._changes = 0
        self._said_mode = False

    def before_step(self) -> bool:
        """Called with the losses of a batch; returns whether there is something new for a statement."""
        if not self._model.training and not self._said_mode:
            self._look_at_mode()
        return self._look_at_rates() | self._look_at_draws()

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

    def _look_at_draws(self) -> bool:
        """Whether random layers draw from a weaker source than before; a seed that was set by hand is warned of."""
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
                "first weights are made. The privacy statement names it.",
                depth=7,
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


def _is_random_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # of recurrent and attention layers
    return isinstance(dropout, float) and dropout > 0


def _warn(message: str, depth: int = 5) -> None:
    """Of the line of the user's own code, `depth` calls from here."""
    warnings.warn(message, PrivacyWarning, stacklevel=depth)
