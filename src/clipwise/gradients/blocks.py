"""Memory for large tensors that is used again from step to step, on a CPU.

The gradients of all examples fill hundreds of megabytes in a step and are let go at its end. The C library gives
such memory back to the system, and to map it anew, page by page, takes longer than to compute what goes into it.

A block is handed out again only when nothing else refers to its storage: no view, no slice, no numpy array. A torch
that does not tell has every block made anew.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import torch
from torch import Tensor


class Blocks:
    """Blocks of memory by size, at most `most_bytes` of them together."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._by_kind: dict[tuple[int, torch.dtype], deque[Tensor]] = {}
        self._lock = Lock()  # of two threads that look at a free block at once, one must come second

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor with no particular contents, whose memory is the taker's as long as anything refers to it."""
        with self._lock:
            return self._taken(shape, dtype)

    def _taken(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        kind = shape.numel(), dtype
        waiting = self._by_kind.setdefault(kind, deque())
        # The last one that was handed out may be back already; the first one was handed out longest ago. If both
        # are in use, so are the others, nearly always.
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
        if self._bytes + size > self._most:  # of other sizes, most likely, that nobody asks for any more
            self.clear()
        self._by_kind.setdefault(kind, deque()).append(block)
        self._bytes += size
        return block

    def clear(self) -> None:
        """Keep nothing. What is in use stays with those who use it."""
        self._by_kind.clear()
        self._bytes = 0


class Scratch:
    """One piece of memory for what is written, read and done with before the next one asks: as large as the largest."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = Lock()

    def like(self, t: Tensor) -> Tensor:
        """A tensor such as this one, with no particular contents."""
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
        """Keep nothing. What is in use stays with those who use it."""
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")


_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def _references(block: Tensor) -> int | None:
    """How many tensors and storages refer to a tensor's memory; None where torch does not tell."""
    return None if _use_count is None else int(_use_count(block.untyped_storage()._cdata))


_OF_ITSELF = _references(torch.empty(1, device="cpu"))


def _is_free(block: Tensor) -> bool:
    found = _references(block)
    return found is not None and found == _OF_ITSELF
