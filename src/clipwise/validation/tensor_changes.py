"""Detect changes of tensors, by torch's version counters and by checksums for writes that torch does not count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
