"""Reusable CPU memory for large tensors.

Per-example gradients fill hundreds of megabytes in each step and are freed at its end. The C library returns such
memory to the system, and mapping it again, page by page, takes longer than computing its contents.

A block is reused only if nothing else refers to its storage: no view, slice or numpy array. If torch does not expose
the reference count, every block is allocated anew.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import torch
from torch import Tensor


class Blocks:
    """Blocks of memory by size, at most `most_bytes` in total."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._by_kind: dict[tuple[int, torch.dtype], deque[Tensor]] = {}
        self._lock = Lock()  # two threads must not take the same free block

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. Its memory is not reused while anything refers to it."""
        with self._lock:
            return self._taken(shape, dtype)

    def _taken(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        kind = shape.numel(), dtype
        waiting = self._by_kind.setdefault(kind, deque())
        # The block used last may be free again; the first one was used longest ago. If both are in use, nearly always
        # all others are.
        for next_block in (waiting.pop, waiting.popleft):
            block = next_block() if waiting else None
            if block is not None:
                taken = block.view(shape) if _is_free(block) else None
                waiting.append(block)
                if taken is not None:
                    return taken
        return self._fresh(kind).view(shape)

    def _fresh(self, kind: tuple[int, torch.dtype]) -> Tensor:
        block = torch.empty(kind[0], dtype=kind[1], device="cpu")
        size = block.numel() * block.element_size()
        if size > self._most or _use_count is None:
            return block
        if self._bytes + size > self._most:  # most likely by sizes that are no longer used
            self.clear()
        self._by_kind.setdefault(kind, deque()).append(block)
        self._bytes += size
        return block

    def clear(self) -> None:
        """Forget all blocks. Blocks in use stay valid."""
        self._by_kind.clear()
        self._bytes = 0


class Scratch:
    """One buffer, as large as its largest use, for contents that are consumed before the next request."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = Lock()

    def like(self, t: Tensor) -> Tensor:
        """An uninitialised tensor of the same shape and dtype."""
        size = t.numel() * t.element_size()
        if t.device.type != "cpu" or not t.is_contiguous() or size > self._most or _use_count is None:
            return torch.empty_like(t)
        with self._lock:
            if not _is_free(self._kept):
                return torch.empty_like(t)
            if self._kept.numel() < size:
                self._kept = torch.empty(size, dtype=torch.uint8, device="cpu")
            return self._kept[:size].view(t.dtype).view(t.shape)

    def clear(self) -> None:
        """Forget the buffer. If it is in use, it stays valid."""
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")


_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def _references(block: Tensor) -> int | None:
    """The number of references to a tensor's memory; None if torch does not expose it."""
    return None if _use_count is None else int(_use_count(block.untyped_storage()._cdata))


_OF_ITSELF = _references(torch.empty(1, device="cpu"))


def _is_free(block: Tensor) -> bool:
    found = _references(block)
    return found is not None and found == _OF_ITSELF
