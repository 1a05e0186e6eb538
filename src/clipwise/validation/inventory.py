"""The tensors of a model: cached lists of them, and detection of changes.

A step needs lists of parameters, buffers and layers several times, and walking the modules takes longer than all checks
together. They are rebuilt only if something was added, removed or replaced. Changes show in torch's version counters,
and in checksums for writes that torch does not count.

`BufferGuard` detects forward passes that store data in buffers, parameters or attributes of modules. A running mean in
a buffer, a NumPy array or a list would be published with the model without noise. The model is compared at the draw of
a batch and at the step on its losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipwise.errors import UnsupportedModelError
from clipwise.sampling.batch_structure import tensors_in

_VALUES = methodcaller("values")
_KEEPS_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Inventory:
    """The lists of one model at the last call of `up_to_date`.

    Attributes:
        tensors: (name for messages, dictionary, key) of every buffer, parameter and tensor in a plain attribute.
            Tensors that follow from weights alone are left out, since weights are released: spectral norm's power
            iteration, and weights that torch computes from a parametrization.
        state: (name, module, dictionary, key) of every buffer and parameter among these.
        parameters: the result of `named_parameters`.
        statistics: layers that may keep batch statistics.
        modules: the result of `named_modules`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._structure: tuple[list[object], ...] = ()
        self.tensors: list[tuple[str, dict[str, Any], str]] = []
        self.state: list[tuple[str, nn.Module, dict[str, Any], str]] = []
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.statistics: list[tuple[str, nn.Module]] = []
        self.modules: list[tuple[str, nn.Module]] = []

    def up_to_date(self) -> Inventory:
        """Rebuild the lists if the structure changed, and return self."""
        if not self._modules or _structure(self._modules) != self._structure:
            self._walk()
        return self

    def _walk(self) -> None:
        self.modules = list(self._model.named_modules())
        self._modules = [module for _, module in self.modules]  # keeps their ids from being reused
        self._structure = _structure(self._modules)
        self.parameters = list(self._model.named_parameters())
        self.statistics = [(name, m) for name, m in self.modules if isinstance(m, _KEEPS_STATISTICS)]
        named = [(prefix, m) for prefix, m in self.modules if type(m).__name__ != "_SpectralNorm"]
        self.tensors = [
            (f"{kind} {f'{prefix}.{name}' if prefix else name!r}", tensors, name)
            for prefix, module in named
            for kind, tensors, names in (
                ("Buffer", module._buffers, module._buffers),
                ("Parameter", module._parameters, module._parameters),
                ("Attribute", vars(module), _kept_in(module)),
            )
            for name in names
        ]
        self.state = [
            (f"{prefix}.{name}" if prefix else name, module, tensors, name)
            for prefix, module in named
            for tensors in (module._parameters, module._buffers)
            for name in tensors
        ]


def _kept_in(module: nn.Module) -> list[str]:
    """Return attributes that are tensors, without a `weight` computed from `weight_g` or `weight_orig`."""
    made = {name.removesuffix(end) for name in module._parameters for end in ("_g", "_orig")}
    return [name for name, value in vars(module).items() if isinstance(value, Tensor) and name not in made]


def _structure(modules: list[nn.Module]) -> tuple[list[object], ...]:
    """Return types, names and ids of everything the lists depend on. (Buffers are found by key: no ids needed.)"""
    entries: list[dict[str, Any]] = [d for m in modules for d in (m._modules, m._parameters)]
    every = [*entries, *(m._buffers for m in modules)]
    return (
        list(map(type, modules)),
        list(map(id, every)),
        list(map(len, every)),
        list(chain.from_iterable(every)),
        list(map(id, chain.from_iterable(map(_VALUES, entries)))),
        _tensor_attributes(modules),
    )


def _tensor_attributes(modules: list[nn.Module]) -> list[object]:
    """Return the plain attributes that hold tensors now; an attribute may have been None before."""
    kinds = set(map(type, chain.from_iterable(map(_VALUES, map(vars, modules)))))
    if not any(issubclass(kind, Tensor) for kind in kinds):
        return []
    return [(id(m), name) for m in modules for name, value in vars(m).items() if isinstance(value, Tensor)]


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of each tensor's words, mod 2^64: int64 [tensors], on the accelerator if any tensor is.

    A change of a single number always shows. It takes one pass over memory and does not synchronise.
    """
    found = [_checksum(t) for t in tensors]
    device = next((s.device for s in found if s.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([s.to(device) for s in found]) if found else torch.zeros(0, dtype=torch.int64)


def _checksum(t: Tensor) -> Tensor:
    if t.layout is not torch.strided or (t.numel() and not t.data_ptr()):  # sparse, or its memory was freed
        return torch.zeros((), dtype=torch.int64, device=t.device)
    if not t.is_contiguous() or t.data_ptr() % 8 or t.storage_offset() * t.itemsize % 8:
        t = t.clone(memory_format=torch.contiguous_format)
    size = t.numel() * t.itemsize
    word = next(dtype for dtype in _WORDS if size % dtype.itemsize == 0)
    return t.detach().reshape(-1).view(word).sum(dtype=torch.int64)


class Changes:
    """Detects changes of tensors since `remember`.

    Torch does not count writes through `.data` and by fused optimizers. Checksums show them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)  # keeps their ids from being reused
        self._versions: list[int] | None = None
        self._places: list[int] = []
        self._sums = torch.zeros(0)

    def remember(self) -> None:
        """Record the current contents. Does not synchronise."""
        self._versions, self._places = self._versions_now(), self._places_now()
        self._sums = checksums(self._tensors)

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the compared tensors."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def was_counted(self) -> bool:
        """Whether torch counted a change since `remember`. Does not synchronise."""
        return self._versions_now() != self._versions or self._places_now() != self._places

    def has_moved(self) -> Tensor | bool:
        """Whether contents or addresses changed since `remember`; on an accelerator the result stays there."""
        if self._versions is None or self._places_now() != self._places:
            return True
        has_moved = (checksums(self._tensors) != self._sums).any()
        return bool(has_moved) if has_moved.device.type == "cpu" else has_moved

    def has_changed(self) -> bool:
        """Whether torch counted a change or contents changed."""
        return self.was_counted() or bool(self.has_moved())

    def may_have_changed(self) -> bool:
        """Return `has_changed()`, or on an accelerator `was_counted()`, which does not synchronise."""
        return self.has_changed() if self._sums.device.type == "cpu" else self.was_counted()

    def _versions_now(self) -> list[int]:
        return [t._version for t in self._tensors]

    def _places_now(self) -> list[int]:
        return [t.data_ptr() for t in self._tensors]


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

    def __init__(self, model: nn.Module) -> None:
        self.inventory = Inventory(model)
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
    """Compares numbers, NumPy arrays and containers in the attributes of modules.

    An int may advance by the same amount in each forward pass, unless that is the number of examples: a count of calls
    is public. Strings, flags and objects of other libraries are not compared. Objects of classes defined in the same
    Python module are.
    """

    def __init__(self) -> None:
        self._before: Snapshot = {}
        self._advances: dict[str, int] = {}
        self._sizes: set[int] = set()

    def remember(self, modules: Iterable[tuple[str, nn.Module]], sizes: set[int]) -> None:
        """Record the attributes at the draw of a batch. `sizes` are the lengths of its tensors."""
        self._before, self._sizes = _snapshot(modules), sizes - {1}

    def changed(self, modules: Iterable[tuple[str, nn.Module]]) -> str | None:
        """Return the name of an attribute that changed since `remember`, other than a count of calls."""
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
            _held(value, type(module).__module__, 0),
        )
        for prefix, module in modules
        for name, value in vars(module).items()
        if name not in _BUILT_IN and not isinstance(value, (Tensor, *_IGNORED))
    }


def _held(value: Any, home: str, depth: int) -> object:
    """Return the contents of a value in a comparable form; None if they are not compared."""
    if isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool):
        return repr(value)  # NaN equals itself
    if isinstance(value, np.ndarray):
        entries = value.reshape(-1)[:: 1 + value.size // _MOST_OF_ARRAY]
        return value.shape, repr(entries) if value.dtype == object else hash(entries.tobytes())
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if depth == _DEEPEST:
        return None
    if isinstance(value, (str, bytes, bool)):
        return value
    if isinstance(value, Mapping):
        value = list(value.items())
    elif isinstance(value, Set):
        return len(value), frozenset(map(repr, list(value)[:_MOST]))
    elif type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        value = list(vars(value).items())
    elif not isinstance(value, (list, tuple, deque)):
        return None
    members = list(value)
    return len(members), tuple(_held(member, home, depth + 1) for member in members[:_MOST])
