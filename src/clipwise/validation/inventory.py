"""The tensors of a model: cached lists of them, and detection of changes.

A step needs lists of parameters, buffers and layers several times, and walking the modules takes longer than all checks
together. They are rebuilt only if something was added, removed or replaced. Changes show in torch's version counters,
and in checksums for writes that torch does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

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
