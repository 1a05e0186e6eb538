"""Checks of the user's training loop around the steps of a private run.

The user steps the optimizer. Hooks on its `step` distinguish updates on released gradients from all others: a plain
`loss.backward(); optimizer.step()`, a framework with its own optimizer steps, a closure.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from clipwise.errors import ConfigurationError, StepError, warn

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

# By the id of a parameter. The run keeps the parameter alive.
_RUNS: WeakValueDictionary[int, StepContext] = WeakValueDictionary()
_LEAST_SCALE = 128.0  # of a GradScaler, which starts at 65536
_SOURCES = ("", "key", "torch", "seeded")  # of random layers' draws, strongest first; "" before the first step

DECLARED = ("public", "post-processing")


def require_alone(run: StepContext, parameters: Mapping[str, nn.Parameter]) -> StepContext | None:
    """Warn if another run trains the same parameters with another ledger, or has trained them.

    Returns an open run with the same model and ledger, or None.
    """
    found = None
    for name, p in parameters.items():
        other = _RUNS.get(id(p))
        if other is None:
            continue
        if other.ledger is run.ledger and not other.weights.is_closed:
            found = other if other.model is run.model else found
        elif other.ledger.position and other.ledger.run != run.ledger.run:
            warn(
                f"Parameter {name!r} was trained by another private run, which has another ledger. Their privacy "
                "losses add up, and neither statement counts the other run. Give both the same ledger, add up their "
                "ledgers by `clipwise epsilon`, or begin with new weights."
            )
            break
    _RUNS.update({id(p): run for p in parameters.values()})
    return found


def is_newest(run: StepContext) -> bool:
    """Whether no newer run trains the same parameters. A newer one checks the steps of its optimizer itself."""
    return all(_RUNS.get(id(p), run) is run for p in run.parameters.values())


def changed_since_last_run(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """Return the names of tensors that changed since the previous run of this model, while that run object exists.

    Nothing is reported if the model's tensors have other names since, or if that run changed nothing.
    """
    other = next((run for p in parameters.values() if (run := _RUNS.get(id(p))) is not None), None)
    if other is None or other.model is not model or not other.weights.state.is_of_same_tensors():
        return []
    weights = other.weights
    if not (other.ledger.position or weights.has_foreign_step or weights.unverified or weights.changed_before):
        return []
    changed = weights.without_averages(weights.state.changed(looks_inside=True))
    is_same_optimizer = weights.has_foreign_step and other.optimizer is optimizer
    return [*changed, *weights.changed_before, *(["the state of the optimizer"] if is_same_optimizer else [])]


def require_same_ranks(count: int) -> None:
    """Raise if torch.distributed got several ranks after `make_private` was called without them."""
    distributed = torch.distributed
    if count > 1 or not (distributed.is_available() and distributed.is_initialized()):
        return
    if (ranks := distributed.get_world_size()) > 1:
        raise ConfigurationError(
            f"torch.distributed has {ranks} ranks and was initialised after make_private: call init_process_group() "
            "first. Otherwise each process trains its own model and counts only its own releases."
        )


def require_process_group() -> None:
    """Raise in a process of torchrun without a process group: it would train its own model with its own ledger."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return
    ranks = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    if ranks.isdecimal() and int(ranks) > 1:
        raise ConfigurationError(
            f"torchrun started {ranks} processes, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before make_private. Without it each process would draw its own "
            "batches and noise, train its own model and count only its own releases."
        )


def require_no_loss_scaling(losses: Tensor) -> None:
    """Raise if `GradScaler.scale` multiplied the losses: their last factor is then a tensor with a power of two."""
    node = losses.grad_fn
    if node is None or node.name() != "MulBackward0":
        return
    for factor in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(factor, Tensor) and factor.dim() == 0 and not factor.requires_grad:
            value = float(factor)
            if value >= _LEAST_SCALE and value.hex().startswith("0x1.0000000000000p"):
                raise StepError(
                    "losses were multiplied by a large power of two, as torch.amp.GradScaler.scale does. Loss scaling "
                    "does not help here: each example's gradient is clipped, so the factor only makes all of them "
                    "reach max_norm. Remove the scaler, call private.step(losses), and use autocast with "
                    "torch.bfloat16, which needs no scaling."
                )


class LoopWarnings:
    """Checks model and optimizer at every step, and warns of each mistake once.

    Attributes:
        follows_metric: whether a scheduler sets the learning rate from a metric.
        draws: the weakest source of random layers' draws so far: the run's "key", "torch", or "seeded".
        draws_from_key: whether random layers draw from the run's key for the current batch.
        is_reproducible: whether the run has a given seed, and so makes no claim that needs a secret one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.follows_metric = self.draws_from_key = self.is_reproducible = False
        self.draws = ""
        self._model, self._optimizer = model, optimizer
        self._devices = {p.device for p in model.parameters()}
        self._looked_at = (False, 0, "torch")
        self._rates: list[float] | None = self._rates_now()  # until their first change
        self._rates_of_piece = self._rates_now()
        self._warned_of_mode = self._warned_of_pieces = False

    def merge(self, draws: str, follows_metric: bool) -> bool:
        """Take over what another rank found. Returns whether the statement has to change."""
        before = self.draws, self.follows_metric
        self.draws = max(self.draws, draws, key=_SOURCES.index)
        self.follows_metric |= follows_metric
        return before != (self.draws, self.follows_metric)

    def before_step(self, is_first: bool) -> bool:
        """Check before the use of a piece of a batch, maybe its first. Returns whether the statement has to change."""
        if not self._model.training and not self._warned_of_mode:
            self._look_at_mode()
        before, self._rates_of_piece = self._rates_of_piece, self._rates_now()
        if not is_first and before != self._rates_of_piece and not self._warned_of_pieces:
            self._warned_of_pieces = True
            warn(
                "The learning rate changed between two pieces of one batch, so it depends on the number of pieces, "
                "which is as private as the size of the batch. Step a scheduler once for each batch, when private.step "
                "returns True, or once for each epoch."
            )
        return self._look_at_rates() | self._look_at_draws()

    def _look_at_mode(self) -> None:
        for name, module in self._model.named_modules():
            if _is_random_in_training(module):
                self._warned_of_mode = True
                return warn(
                    f"The model is in .eval(), so layer {name!r} ({type(module).__name__}) drops nothing in training. "
                    "If .eval() is left over from an evaluation, call model.train() before the next step."
                )

    def _look_at_rates(self) -> bool:
        if self.follows_metric or self._rates is None or self._rates_now() == self._rates:
            return False
        self._rates = None  # the search takes milliseconds: it runs at the first change only
        self.follows_metric = any(map(_is_fed_scheduler, gc.get_referrers(self._optimizer)))
        if self.follows_metric:
            warn(
                "The learning rate follows a metric (ReduceLROnPlateau). If that is a loss or an accuracy of the "
                "private data, it is a release that is not accounted: use a metric of public data, or a scheduler "
                "that only counts steps. The privacy statement reports it."
            )
        return self.follows_metric

    def _look_at_draws(self) -> bool:
        """Return whether random layers draw from a weaker source than before; warn of a manual seed."""
        found = "key" if self.draws_from_key else "torch"
        if found == "torch" and not self.is_reproducible and is_seeded_by_hand(self._devices):
            found = self._seeded_or_torch()
        if _SOURCES.index(found) <= _SOURCES.index(self.draws):
            return False
        self.draws = found
        if found == "seeded":
            warn(
                "torch's generator was seeded by hand (torch.manual_seed), and the model has random layers, such as "
                "dropout, that draw from it. The numbers of a record depend on the records before it in the batch. "
                "With a known seed, the removal of one record is visible in the draws of others, and no clip bounds "
                "that. Compute the losses inside `with private.randomness():`, or call torch.seed() after the model "
                "is initialised. The privacy statement reports it."
            )
        return True

    def _seeded_or_torch(self) -> str:
        """Return "seeded" if a random layer is active, else "torch". Cached per training mode and seed."""
        now = self._model.training, torch.initial_seed()
        if now != self._looked_at[:2]:
            is_random = any(m.training and _is_random_in_training(m) for m in self._model.modules())
            self._looked_at = (*now, "seeded" if is_random else "torch")
        return self._looked_at[2]

    def _rates_now(self) -> list[float]:
        """Return learning rates that are numbers: reading a tensor would synchronise, and schedulers set numbers."""
        return [g["lr"] for g in self._optimizer.param_groups if isinstance(g.get("lr"), (int, float))]


def is_seeded_by_hand(devices: Iterable[torch.device]) -> bool:
    """Whether a global generator of these devices has a seed below 2^32, as users choose.

    Torch seeds its generators with 64 random bits (53 in some versions) when a process starts.
    """
    by_kind = {"cpu": (torch.default_generator,), "cuda": torch.cuda.default_generators}
    return any(0 <= by_kind[d.type][d.index or 0].initial_seed() < 2**32 for d in devices if d.type in by_kind)


def _is_fed_scheduler(holder: object) -> bool:
    return isinstance(holder, ReduceLROnPlateau) or (isinstance(holder, dict) and "num_bad_epochs" in holder)


def _is_random_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # of recurrent and attention layers
    return isinstance(dropout, float) and dropout > 0
