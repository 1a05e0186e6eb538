"""Checks around a step: the forward pass and the training loop may not change the model; warnings about the loop.

A running mean that a forward pass stores in a buffer, a NumPy array or a list would be published with the model without
noise. So the model is compared at the draw of a batch and at the step on its losses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from clipwise.errors import StepError, UnsupportedModelError, warn
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.coupling import PAIRS
from clipwise.validation.inventory import Inventory, checksums
from clipwise.validation.marked import tracked
from clipwise.validation.plain_attributes import PlainState
from clipwise.validation.step_inputs import require_no_hooks, require_no_statistics_in

_TENSOR_BATCHES = 2  # batches on which contents of tensors are compared: `.data` changes no version
_PLAIN_BATCHES = 8  # and plain attributes: a count that follows the data may advance equally on two batches
_SOURCES = ("", "key", "torch", "seeded")  # of random layers' draws, strongest first; "" before the first step
_CHANGED = (
    "was set or changed between the draw of a batch and private.step, for instance by a forward pass that stores "
    "statistics. It would be published with the model without any noise. Set it before the first batch, from public "
    "data. Update parameters before the next batch is drawn. Return from forward what the loss needs."
)
_FIRST_PASS = (
    "(If only the first forward pass sets it, run the model on synthetic rows before make_private. A count of forward "
    "passes is allowed if it advances by the same number each time.)"
)


class BufferGuard:
    """Compares parameters, buffers and attributes at the draw of a batch and at the step on its losses."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory.up_to_date()
        self._versions: dict[str, tuple[object, ...]] = {}
        self._held: list[Tensor] = []  # keeps their ids from being reused
        self._tensors_left, self._plain_left = _TENSOR_BATCHES, _PLAIN_BATCHES
        self._plain = PlainState()

    def remember(self, batch: object = None) -> None:
        """Record the state at the draw of a batch, with an inventory that is up to date."""
        self._versions, self._held = self._now()
        if self._plain_left:
            self._plain.remember(self.inventory.modules, {len(t) for t in tensors_in(batch) if t.dim()})

    def compare(self) -> None:
        """Raise if the state changed since `remember`."""
        self.inventory.up_to_date()
        self.compare_listed()

    def compare_listed(self) -> None:
        """`compare` with an inventory that is up to date."""
        now, held = self._now()
        if now != self._versions:
            for name, version in now.items():
                if self._versions.get(name) != version:
                    raise UnsupportedModelError(f"{name} {_CHANGED}")
        if self._plain_left:
            if (changed := self._plain.changed(self.inventory.modules)) is not None:
                raise UnsupportedModelError(f"Attribute {changed!r} {_CHANGED} {_FIRST_PASS}")
            self._plain_left -= 1
        if self._tensors_left:
            self._tensors_left -= 1
            now, held = self._now()  # without checksums after the last compared batch
        self._versions, self._held = now, held

    def _now(self) -> tuple[dict[str, tuple[object, ...]], list[Tensor]]:
        listed = ((name, tensors[key]) for name, tensors, key in self.inventory.tensors)
        found = [(name, t) for name, t in listed if t is not None]
        versions: dict[str, tuple[object, ...]] = {name: (id(t), t._version) for name, t in found}
        if self._tensors_left:
            readable = {name: t for name, t in found if not is_lazy(t)}
            for name, checksum in zip(readable, checksums(readable.values()).tolist(), strict=True):
                versions[name] = (*versions[name], checksum)
        return versions, [t for _, t in found]


class StepGuard(BufferGuard):
    """All checks of the model around one step of a private run.

    Args:
        inventory: of the model to train.
        parameters: the trainable parameters at `make_private`.
        is_coupled: whether whole microbatches are clipped, within which examples may depend on one another.
        has_local_update: whether a step works on a copy of the model, which may keep statistics.
        used: the parameters in the model during a step, if it is sharded.
    """

    def __init__(
        self,
        inventory: Inventory,
        parameters: Mapping[str, nn.Parameter],
        is_coupled: bool = False,
        has_local_update: bool = False,
        used: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._parameters, self._used = parameters, used or parameters
        self._is_coupled, self._has_local_update = is_coupled, has_local_update
        super().__init__(inventory)

    def before_draw(self) -> None:
        """Check before a batch is drawn, and update the lists for `remember`."""
        self.inventory.up_to_date()
        self._require_same_parameters()

    def before_step(self) -> None:
        """Check before the losses are used."""
        self.inventory.up_to_date()
        if not self._has_local_update:
            for name, module in self.inventory.statistics:
                require_no_statistics_in(name, module, self._is_coupled)
        self.compare_listed()
        require_no_hooks(self._parameters)
        self._require_same_parameters()

    def _require_same_parameters(self) -> None:
        for name, p in self.inventory.parameters:
            is_known = p is self._parameters.get(name, p) or p is self._used.get(name)
            if p.requires_grad != (name in self._parameters) or not is_known:
                raise StepError(
                    f"Parameter {name!r} was added, replaced, or its requires_grad changed after make_private: build "
                    "the model (and clip its layers) first, then the optimizer with the parameters to train, then make "
                    "a new private run."
                )


def require_losses(losses: object, size: int, is_coupled: bool = False) -> Tensor:
    """Return losses that are one per example and carry a gradient, or raise. The batch size is secret: not in messages.

    With `is_coupled` (whole microbatches are clipped) a single number is accepted.
    """
    if not isinstance(losses, Tensor):
        raise StepError(f"losses must be a tensor with one loss per example, not {type(losses).__name__}.")
    if type(losses) is not Tensor:
        losses = tracked(losses)
    if is_coupled and size == 0 and (losses.dim() == 0 or losses.shape == (0,)):
        return torch.zeros(0)  # the loss of an empty microbatch is not used
    if losses.dim() == 0 and not is_coupled:
        raise StepError(
            "losses is a single number, so the examples cannot be separated. Give one loss per example: use "
            "reduction='none' and no mean or sum over the batch."
        )
    if losses.shape == (size, size) and size > 1:
        raise StepError(f"{PAIRS} If the second dimension counts positions instead, sum or average over it.")
    if losses.dim() > 1:
        raise StepError(
            f"losses has {losses.dim()} dimensions. Give one loss per example: first make sure that outputs and "
            "targets have the same shape, then sum or average over each example's positions, as in "
            "losses.flatten(1).sum(1)."
        )
    if losses.dim() == 1 and len(losses) != size:
        raise StepError(
            "losses does not have one entry for each example of the batch that private.loader returned. "
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


def require_rows(batch: object, size: int) -> None:
    """Raise if a compiled step does not get the loader's last batch. The batch size is secret: not in messages."""
    rows = {len(t) for t in tensors_in(batch) if t.dim()}
    if rows != {size}:
        raise StepError(
            "step(*batch) takes the last batch of private.loader: tensors with a first dimension that counts its "
            "examples. Do not drop, repeat or pool examples, and add nothing else to it."
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
        self._warned_of_mode = False

    def merge(self, draws: str, follows_metric: bool) -> bool:
        """Take over what another rank found. Returns whether the statement has to change."""
        before = self.draws, self.follows_metric
        self.draws = max(self.draws, draws, key=_SOURCES.index)
        self.follows_metric |= follows_metric
        return before != (self.draws, self.follows_metric)

    def before_step(self) -> bool:
        """Check before the step of a batch. Returns whether the statement has to change."""
        if not self._model.training and not self._warned_of_mode:
            self._look_at_mode()
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
