"""Cached flat lists of a model's parameters, buffers and layers.

A step needs them several times, and walking the modules takes longer than all checks together. The lists are rebuilt
only if something was added, removed or replaced.
"""

from __future__ import annotations

from itertools import chain
from operator import methodcaller
from typing import Any

from torch import Tensor, nn

_VALUES = methodcaller("values")
_KEEPS_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


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
