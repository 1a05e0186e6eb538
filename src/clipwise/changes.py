"""Whether tensors are still what they were: what torch counts, and what it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

_SMALL = 4096  # numbers: up to here to copy them costs less than an operation


class Changes:
    """Whether tensors were changed since the last look, also in ways that torch does not count.

    Writes through `.data` are not counted, nor are those of fused optimizers. They show in the contents: on a CPU in
    a weighted sum of the words that hold them, which costs one pass over memory; elsewhere in the tensors' lengths.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)  # held here, so that no other can get their identity
        self._near: list[_Words] = []
        self._far: list[Tensor] = []
        self._seen: object = None
        self._sums: list[int | None] = [None]
        self._lengths: Tensor | None = None

    def remember(self) -> None:
        """They are as they should be. Nobody waits for the device."""
        self._sums = self._sums_now()
        if None in self._sums or self._seen is None:  # they lie elsewhere now
            near = [t for t in self._tensors if _has_words(t)]
            small = [t for t in near if t.numel() <= _SMALL]
            apart = [[t] for t in near if t.numel() > _SMALL]
            self._near = [_Words(those) for those in (small, *apart) if those]
            self._far = [
                t for t in self._tensors if (t.is_floating_point() or t.is_complex()) and not _has_words(t)
            ]
            self._sums = self._sums_now()
        self._seen, self._lengths = self._counts(), self._lengths_now()

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that are looked at."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def was_counted(self) -> bool:
        """Whether torch has counted a change since `remember`: what the host alone can tell."""
        return self._counts() != self._seen

    def has_moved(self) -> Tensor | bool:
        """Whether contents differ from those of `remember`; on an accelerator the answer stays there."""
        if self._seen is None or self._sums_now() != self._sums:
            return True
        now = self._lengths_now()
        return False if now is None or self._lengths is None else (now != self._lengths).any()

    def has_changed(self) -> bool:
        """Since `remember`, by either sign."""
        return self.was_counted() or bool(self.has_moved())

    def may_have_changed(self) -> bool:
        """`has_changed`; on an accelerator only what the host can tell, so that nobody waits."""
        is_near = all(t.device.type == "cpu" for t in self._far)
        return self.has_changed() if is_near else self.was_counted() or self._sums_now() != self._sums

    def _counts(self) -> object:
        return [(t._version, t.data_ptr()) for t in self._tensors]

    def _sums_now(self) -> list[int | None]:
        return [words.total() for words in self._near]

    @torch.no_grad()
    def _lengths_now(self) -> Tensor | None:
        if not self._far:
            return None
        lengths = torch._foreach_norm(self._far)
        device, is_mixed = lengths[0].device, len({n.dtype for n in lengths}) > 1
        found = torch.stack([n.to(device, torch.float64 if is_mixed else n.dtype) for n in lengths])
        return found.nan_to_num(nan=-1.0, posinf=torch.inf)  # what is not a number stays what it is


def _has_words(t: Tensor) -> bool:
    """Whether its numbers lie one after another in the host's memory."""
    return t.device.type == "cpu" and t.layout is torch.strided and t.is_contiguous()


# Odd weights of words, by their place: one that changes changes the sum, and to double some numbers and halve others,
# which adds 2^23 to some words of float32 and takes it from others, changes it too. A prime number of them.
_WEIGHTS = 2 * torch.randint(2**62, (4093,), generator=torch.Generator().manual_seed(0)) + 1


class _Words:
    """The memory of some tensors, read as whole numbers of up to 64 bits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._places = tensors, [t.data_ptr() for t in tensors]
        self._words = [_words_of(t) for t in tensors]

    def total(self) -> int | None:
        """Their weighted sum, modulo 2^64; None if a tensor lies elsewhere now: this memory may be gone."""
        if [t.data_ptr() for t in self._tensors] != self._places:
            return None
        words = self._words[0] if len(self._words) == 1 else torch.cat(self._words)
        rows = len(words) // len(_WEIGHTS)
        rest = words[rows * len(_WEIGHTS) :]
        total = rest.mul(_WEIGHTS[: len(rest)]).sum()
        if rows:
            total += words[: rows * len(_WEIGHTS)].view(rows, -1).sum(0).mul_(_WEIGHTS).sum()
        return int(total)


def _words_of(tensor: Tensor) -> Tensor:
    held = tensor.detach().reshape(-1).view(torch.uint8)
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return held.view(next(k for k in kinds if len(held) % k.itemsize == 0))
