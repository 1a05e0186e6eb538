"""Checks of the model around a step: the forward pass and the training loop may not change it.

A running mean that a forward pass stores in a buffer, a NumPy array or a list would be published with the model without
noise. So the model is compared at the draw of a batch and at the step on its losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import StepError, UnsupportedModelError
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.inventory import Inventory, checksums
from clipwise.validation.step_inputs import require_no_hooks, require_no_statistics_in
from clipwise.validation.verified_weights import ReleasedGradients

_TENSOR_BATCHES = 2  # batches on which contents of tensors are compared: `.data` changes no version
_PLAIN_BATCHES = 8  # and plain attributes: a count that follows the data may advance equally on two batches
_BUILT_IN = frozenset(vars(nn.Module()))  # attributes of every module
_DEEPEST = 4
_MOST = 10_000  # entries of one container
_MOST_OF_ARRAY = 1_000_000
_IGNORED = (str, bytes, bool, type(None), nn.Module, nn.Parameter)
_CHANGED = (
    "was set or changed between the draw of a batch and private.step, for instance by a forward pass that stores "
    "statistics. It would be published with the model without any noise. Set it before the first batch, from public "
    "data. Update parameters before the next batch is drawn. Return from forward what the loss needs."
)
_FIRST_PASS = (
    "(If only the first forward pass sets it, run the model on synthetic rows before make_private. A count of forward "
    "passes is allowed if it advances by the same number each time.)"
)

Snapshot = dict[str, tuple[object, object]]  # by name: the value if it is an int, and comparable contents


class BufferGuard:
    """Compares parameters, buffers and attributes at the draw of a batch and at the step on its losses."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._versions: dict[str, tuple[object, ...]] = {}
        self._held: list[Tensor] = []  # keeps their ids from being reused
        self._tensors_left, self._plain_left = _TENSOR_BATCHES, _PLAIN_BATCHES
        self._plain = PlainState()

    def remember(self, batch: object = None) -> None:
        """Record the state at the draw of a batch."""
        self.inventory.up_to_date()
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


class PlainState:
    """Compares numbers, NumPy arrays, containers and objects of the same Python module in the attributes of modules.

    An int may advance by the same amount in each forward pass, unless that is the number of examples: a count of calls
    is public.
    """

    def __init__(self) -> None:
        self._before: Snapshot = {}
        self._advances: dict[str, int] = {}
        self._sizes: set[int] = set()

    def remember(self, modules: Iterable[tuple[str, nn.Module]], sizes: set[int]) -> None:
        self._before, self._sizes = _snapshot(modules), sizes - {1}

    def changed(self, modules: Iterable[tuple[str, nn.Module]]) -> str | None:
        """The name of an attribute that changed since `remember`, other than a count of calls; or None."""
        now = _snapshot(modules)
        for name in sorted(now.keys() | self._before.keys()):
            before, after = self._before.get(name, (None, None)), now.get(name, (None, None))
            if before[1] != after[1] and not self._is_count(name, before[0], after[0]):
                return name
        self._before = now
        return None

    def _is_count(self, name: str, before: object, after: object) -> bool:
        if not isinstance(before, int) or not isinstance(after, int):
            return False
        advance = after - before
        if advance in self._sizes and name not in self._advances:
            return False
        return self._advances.setdefault(name, advance) == advance


def _snapshot(modules: Iterable[tuple[str, nn.Module]]) -> Snapshot:
    return {
        f"{prefix}.{name}" if prefix else name: (
            value if type(value) is int else None,
            _held(value, type(module).__module__),
        )
        for prefix, module in modules
        for name, value in vars(module).items()
        if name not in _BUILT_IN and not isinstance(value, (Tensor, *_IGNORED))
    }


def _held(value: Any, home: str, depth: int = 0) -> object:
    """The contents of a value in a comparable form; None if they are not compared."""
    if isinstance(value, (int, float, complex, np.number, str, bytes)):
        return repr(value)  # NaN equals itself
    if isinstance(value, np.ndarray):
        return value.shape, hash(value.reshape(-1)[:: 1 + value.size // _MOST_OF_ARRAY].tobytes())
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, Mapping):
        value = list(value.items())
    elif type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        value = list(vars(value).items())
    if depth == _DEEPEST or not isinstance(value, (list, tuple, deque, Set)):
        return None
    return len(value), tuple(_held(member, home, depth + 1) for member in islice(value, _MOST))


class StepGuard(BufferGuard):
    """All checks of the model around one step of a private run.

    Args:
        inventory: of the model to train.
        parameters: the trainable parameters at `make_private`.
        released: the gradients that the run wrote to `.grad`.
        is_coupled: whether whole microbatches are clipped, within which examples may depend on one another.
        has_local_update: whether a step works on a copy of the model, which may keep statistics.
        used: the parameters in the model during a step, if it is sharded.
    """

    def __init__(
        self,
        inventory: Inventory,
        parameters: Mapping[str, nn.Parameter],
        released: ReleasedGradients,
        is_coupled: bool = False,
        has_local_update: bool = False,
        used: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._parameters, self._used, self._released = parameters, used or parameters, released
        self._is_coupled, self._has_local_update = is_coupled, has_local_update
        super().__init__(inventory)

    def before_draw(self) -> None:
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
        self._released.require_own()

    def _require_same_parameters(self) -> None:
        for name, p in self.inventory.parameters:
            is_known = p is self._parameters.get(name, p) or p is self._used.get(name)
            if p.requires_grad != (name in self._parameters) or not is_known:
                raise StepError(
                    f"Parameter {name!r} was added, replaced, or its requires_grad changed after make_private: build "
                    "the model (and clip its layers) first, then the optimizer with the parameters to train, then make "
                    "a new private run."
                )
