"""Whether tensors are still what they were: what torch counts, and what it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

# Odd weights of words, by their place: one that changes changes the sum, and to double some numbers and halve others,
# which adds 2^23 to some words of float32 and takes it from others, changes it too. A prime number of them.
_WEIGHTS = 2 * torch.randint(2**62, (1021,), generator=torch.Generator().manual_seed(0)) + 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Contents:
    """One whole number for each of some tensors, which hardly stays the same when the contents change.

        sum_j w_j x_j  mod 2^64

    x_j are the words that hold the tensor's numbers, in the order of their indices, and w_j odd weights that repeat
    every 1021 words. It takes one pass over memory, waits for no device, and is the same on every device.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = self._places_now()
        on_device: dict[torch.device, list[int]] = {}
        for index, t in enumerate(self._tensors):
            on_device.setdefault(t.device, []).append(index)
        self._groups = [_Group([self._tensors[i] for i in those]) for those in on_device.values()]
        order = [i for those in on_device.values() for i in those]
        self._positions = sorted(range(len(order)), key=order.__getitem__)
        self.device = next((d for d in on_device if d.type != "cpu"), torch.device("cpu"))

    def is_in_place(self) -> bool:
        """Whether all tensors still lie in the memory that is read."""
        return self._places_now() == self._places

    @torch.no_grad()
    def sums(self) -> Tensor:
        """int64 [tensors], on the accelerator if any tensor is on one."""
        if len(self._groups) == 1:
            return self._groups[0].sums()
        found = [group.sums().to(self.device) for group in self._groups]
        return torch.cat([*found, torch.zeros(0, dtype=torch.int64, device=self.device)])[self._positions]

    def _places_now(self) -> list[int]:
        return [t.data_ptr() for t in self._tensors]


class _Group:
    """The tensors on one device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._words = [_words_of(t) if _is_readable(t) else None for t in tensors]
        device = tensors[0].device
        lengths = [[len(piece) for piece in self._pieces(index)] for index in range(len(tensors))]
        ends = torch.tensor([sum(those) for those in lengths]).cumsum(0)
        weights = [_WEIGHTS[:length] for those in lengths for length in those]
        self._ends = ends.to(device)
        self._weights = torch.cat(weights).to(device)
        self._nothing = torch.zeros(1, dtype=torch.int64, device=device)

    def sums(self) -> Tensor:
        pieces = [piece for index in range(len(self._tensors)) for piece in self._pieces(index)]
        so_far = torch.cat(pieces).mul(self._weights).cumsum(0)
        return torch.cat([self._nothing, so_far])[self._ends].diff(prepend=self._nothing)

    def _pieces(self, index: int) -> list[Tensor]:
        """The words of a tensor. Those that are a multiple of 1021 apart weigh the same, and are added up first."""
        words = self._words[index]
        if words is None:
            t = self._tensors[index]
            is_there = t.layout is torch.strided and (t.data_ptr() or not t.numel())
            words = _words_of(
                t.detach().clone(memory_format=torch.contiguous_format) if is_there else torch.zeros(0)
            )
        rows, width = len(words) // len(_WEIGHTS), len(_WEIGHTS)
        if rows < 2:
            return [words[:width], words[width:]]
        return [words[: rows * width].view(rows, width).sum(0), words[rows * width :]]


class Changes:
    """Whether tensors were changed since the last look, also in ways that torch does not count.

    Writes through `.data` are not counted, nor are those of fused optimizers. They show in the contents.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)  # held here, so that no other can get their identity
        self._contents: Contents | None = None
        self._seen: object = None
        self._sums = torch.zeros(0)

    def remember(self) -> None:
        """They are as they should be. Nobody waits for the device."""
        if self._contents is None or not self._contents.is_in_place():
            self._contents = Contents(self._tensors)
        self._seen, self._sums = self._counts(), self._contents.sums()

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that are looked at."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def was_counted(self) -> bool:
        """Whether torch has counted a change since `remember`: what the host alone can tell."""
        return self._counts() != self._seen

    def has_moved(self) -> Tensor | bool:
        """Whether contents or their place differ from those of `remember`; on an accelerator the answer stays there."""
        if self._contents is None or not self._contents.is_in_place():
            return True
        has_moved = (self._contents.sums() != self._sums).any()
        return bool(has_moved) if self._contents.device.type == "cpu" else has_moved

    def has_changed(self) -> bool:
        """Since `remember`, by either sign."""
        return self.was_counted() or bool(self.has_moved())

    def may_have_changed(self) -> bool:
        """`has_changed`; on an accelerator only what the host can tell, so that nobody waits."""
        is_near = self._contents is None or self._contents.device.type == "cpu"
        return self.has_changed() if is_near else self.was_counted()

    def _counts(self) -> object:
        return [(t._version, t.data_ptr()) for t in self._tensors]


def _is_readable(t: Tensor) -> bool:
    """Whether its numbers lie one after another, where whole words begin."""
    if t.layout is not torch.strided or not t.is_contiguous() or not t.data_ptr():
        return False
    return t.data_ptr() % 8 == 0 and t.storage_offset() * t.itemsize % 8 == 0


def _words_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as the longest words that fill it."""
    held = tensor.detach().reshape(-1).view(torch.uint8)
    return held.view(next(k for k in _WORDS if len(held) % k.itemsize == 0))
