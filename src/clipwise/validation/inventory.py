"""Lists of the tensors of a model, and whether something else than the private run changed them.

A privacy statement is about the current weights. A run therefore records every parameter and buffer after
`make_private` and after each update, and compares (`ModelState`). Version counters and addresses are free, but miss
writes through `.data`, by fused optimizers and by replayed CUDA graphs. Checksums find these in one pass over memory.

Walking a model costs more than comparing it, so the lists are kept (`Inventory`) as long as its structure is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_VALUES = methodcaller("values")
_KEEPS_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_SAMPLED = 128  # entries of each tensor that are compared before an update and after a dtype change
_SAMPLED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Inventory:
    """The lists of one model at the last call of `up_to_date`.

    Attributes:
        tensors: (name for messages, dictionary, key) of every buffer, parameter and tensor in a plain attribute.
            Tensors that follow from weights alone are left out, since weights are released: spectral norm's power
            iteration, and weights that torch computes from a parametrization.
        state: (name, module, dictionary, key) of every buffer and parameter among these, without buffers that follow
            from weights and public rows alone (`PublicBatchNorm`).
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
            if tensors is module._parameters or not getattr(module, "buffers_follow_weights", False)
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
    """Detects changes of tensors since `remember`, also those that torch does not count (`.data`, fused optimizers)."""

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

    def may_have_changed(self) -> bool:
        """Whether torch counted a change or, on the CPU only so as not to synchronise, contents changed."""
        return self.was_counted() or (self._sums.device.type == "cpu" and bool(self.has_moved()))

    def _versions_now(self) -> list[int]:
        return [t._version for t in self._tensors]

    def _places_now(self) -> list[int]:
        return [t.data_ptr() for t in self._tensors]


class ModelState:
    """Every parameter and buffer of a model after the last verified update.

    Runs with the same model and ledger share it.

    Args:
        model: the model.
        stored: maps a parameter or buffer to the tensor that holds its values in this process; None if that is the
            parameter or buffer itself, as in a model that is not sharded.
    """

    def __init__(self, model: nn.Module, stored: Callable[[Tensor], Tensor] | None = None) -> None:
        self._stored = stored
        self.is_updating = False  # whether a run steps the optimizer on a released gradient
        self.inventory = Inventory(model)
        self._saved: set[tuple[int, ...]] = set()  # checksums of checkpoints and of the initial weights
        self._found: list[str] = []  # names of tensors changed before an update
        self._moved: Tensor | None = None  # changed entries of the sample, still on an accelerator
        self._tensors: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._places: list[tuple[str, int, int]] = []
        self.accept()
        self.save()  # restoring the initial weights is allowed

    def take(self) -> None:
        """Record the model after an update of verified weights. Does not synchronise.

        Here and in `changed_before_update` the inventory is that of the last check of the step (step_guard.py).
        """
        tensors = self._tensors_now()
        places = _places(tensors)
        if places != self._places:
            self._found = self._found_before()
            self._tensors, self._places, self._views = tensors, places, _sampled(tensors)
            self._dtypes = {name: t.dtype for name, t in tensors.items()}
        self._versions, self._sums = _versions(tensors), checksums(tensors.values())
        self._sample = self._sample_now()

    def accept(self) -> None:
        """Accept the current model and discard earlier findings."""
        self._found, self._moved = [], None
        self.inventory.up_to_date()
        self.take()

    def is_of_same_tensors(self) -> bool:
        """Whether the model has parameters and buffers with the same names as before."""
        self.inventory.up_to_date()
        return self._tensors_now().keys() == self._tensors.keys()

    def was_counted(self) -> bool:
        """Whether torch may have counted a write, or a tensor was replaced or moved. Does not synchronise."""
        return self._is_counted(self._tensors_now())

    def changed(self, looks_inside: bool = False, at_draw: bool = False) -> list[str]:
        """Return the names of tensors that changed, were added or were removed since `take`.

        Equal contents elsewhere are accepted (`.to(device)`, weights swapped and restored). So are contents rounded to
        another dtype (`.half()`), those of a checkpoint of the run, and the initial ones.

        Args:
            looks_inside: compare contents even if torch counted no write.
            at_draw: in a step, where the inventory is up to date. Does not read what `changed_before_update` left on an
                accelerator, which would synchronise.
        """
        if not at_draw:
            self.inventory.up_to_date()
        now = self._tensors_now()
        is_counted = self._is_counted(now)
        found = self._found if at_draw else self._found_before()
        if found or not (is_counted or looks_inside):
            return found
        if now.keys() != self._tensors.keys():
            return sorted(now.keys() ^ self._tensors.keys())
        sums = checksums(now.values())
        differ = (sums != self._sums.to(sums.device)).tolist()
        found = [name for name, is_other in zip(now, differ, strict=True) if is_other]
        found = [name for name in found if name not in self._rounded(found, now)]
        if found and tuple(sums.tolist()) not in self._saved:
            return found
        if is_counted:
            self.take()
        return []

    def changed_before_update(self) -> list[str]:
        """Run `changed` before an update overwrites the contents. Does not synchronise.

        Writes that torch does not count show in a sample of each tensor, since an update moves nearly all entries. On
        an accelerator the result stays there until the next `changed`.
        """
        if self.was_counted():
            return self.changed()
        moved = _bits(self._sample_now()) != _bits(self._sample)
        if moved.device.type == "cpu":
            return self.changed(looks_inside=True) if bool(moved.any()) else []
        self._moved = moved if self._moved is None else self._moved | moved
        return []

    def save(self) -> dict[str, int]:
        """Return checksums of the model's `state_dict`, in plain types. These contents are accepted later."""
        values = self._sums.tolist()
        self._saved.add(tuple(values))
        kept = self._persistent()
        return {name: value for name, value in zip(self._tensors, values, strict=True) if name in kept}

    def checksums_of(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the checksums of a `state_dict` of the model with the entries of all ranks."""
        self.inventory.up_to_date()
        kept = self._persistent()
        now = {name: state[name] for name in self._tensors_now() if name in kept}
        return dict(zip(now, checksums(now.values()).tolist(), strict=True))

    def differing(self, saved: Mapping[str, int], whole: Mapping[str, Tensor] | None = None) -> list[str]:
        """Return the names of tensors that differ from the checksums that `save` returned.

        `whole` is the `state_dict` with the entries of all ranks, for a sharded model.
        """
        values = self.checksums_of(self._tensors_now() if whole is None else whole)
        return sorted(n for n in values.keys() | saved.keys() if values.get(n) != saved.get(n))

    def _found_before(self) -> list[str]:
        if self._moved is not None:
            moved, self._moved = self._split(self._moved.cpu()), None
            self._found += [name for name, those in moved.items() if bool(those.any())]
        return self._found

    def _sample_now(self) -> Tensor:
        return torch.cat(list(self._views.values())) if self._views else torch.zeros(0)

    def _split(self, sample: Tensor) -> dict[str, Tensor]:
        lengths = [len(view) for view in self._views.values()]
        return dict(zip(self._views, torch.split(sample, lengths), strict=True))

    def _tensors_now(self) -> dict[str, Tensor]:
        stored = self._stored
        return {
            name: t if stored is None else stored(t)
            for name, _, tensors, key in self.inventory.state
            if (t := tensors[key]) is not None and not is_lazy(t)
        }

    def _is_counted(self, now: Mapping[str, Tensor]) -> bool:
        # Torch does not count changes of DTensors by functions on lists, such as those of optimizers.
        return self._stored is not None or _versions(now) != self._versions or _places(now) != self._places

    def _persistent(self) -> set[str]:
        return {
            name
            for name, module, tensors, key in self.inventory.state
            if tensors is module._parameters or key not in module._non_persistent_buffers_set
        }

    def _rounded(self, found: list[str], now: Mapping[str, Tensor]) -> set[str]:
        """Return those with another dtype that hold the recorded numbers, rounded. Compares a sample."""
        before = self._split(self._sample)
        after = _sampled({name: now[name] for name in found if now[name].dtype != self._dtypes[name]})
        return {
            name
            for name, sample in after.items()
            if name in before
            and before[name].shape == sample.shape
            and torch.allclose(before[name].to(sample), sample, rtol=0, atol=0, equal_nan=True)
        }


def _versions(tensors: Mapping[str, Tensor]) -> list[int]:
    return [t._version for t in tensors.values()]


def _places(tensors: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
    return [(name, id(t), t.data_ptr()) for name, t in tensors.items()]


def _bits(sample: Tensor) -> Tensor:
    """The bits for comparison: NaN is not equal to itself."""
    return sample.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[sample.itemsize])


def _sampled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of evenly spaced entries of each tensor; empty for a model on several devices."""
    if len({t.device for t in tensors.values()}) > 1:
        return {}

    def is_dense(t: Tensor) -> bool:
        is_channels_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
        return t.layout is torch.strided and t.data_ptr() != 0 and (t.is_contiguous() or is_channels_last)

    return {
        name: t.detach().as_strided((t.numel(),), (1,))[:: max(1, t.numel() // _SAMPLED)][:_SAMPLED]
        for name, t in tensors.items()
        if t.dtype in _SAMPLED_TYPES and is_dense(t)
    }
