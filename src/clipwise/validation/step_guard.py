"""Checks of the model around a step: the forward pass and the training loop may not change it.

A running mean that a forward pass stores in a buffer, a NumPy array or a list would be published with the model without
noise. So the model is compared at the draw of a batch and at the step on its losses.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import StepError, UnsupportedModelError
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.inventory import Inventory, checksums
from clipwise.validation.plain_attributes import PlainState
from clipwise.validation.step_inputs import require_no_hooks, require_no_statistics_in

_TENSOR_BATCHES = 2  # batches on which contents of tensors are compared: `.data` changes no version
_PLAIN_BATCHES = 8  # and plain attributes: a count that follows the data may advance equally on two batches
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
