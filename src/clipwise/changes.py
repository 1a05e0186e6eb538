"""Whether tensors are still what they were: what torch counts, and what it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor


class Changes:
    """Whether tensors were changed since the last look, also in ways that torch does not count.

    Writes through `.data` are not counted, nor are those of fused optimizers. They show in the tensors' lengths.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)  # held here, so that no other can get their identity
        self._measured = [t for t in self._tensors if t.is_floating_point()]
        self._seen: object = None
        self._lengths: Tensor | None = None

    def remember(self) -> None:
        """They are as they should be. Nobody waits for the device."""
        self._seen, self._lengths = self._counts(), self._now()

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that are looked at."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def was_counted(self) -> bool:
        """Whether torch has counted a change since `remember`: what the host alone can tell."""
        return self._counts() != self._seen

    def has_moved(self) -> Tensor:
        """Whether a length differs from that of `remember`, on the device."""
        if self._lengths is None or not self._measured:
            return torch.tensor(self._lengths is None)
        return (self._now() != self._lengths).any()

    def has_changed(self) -> bool:
        """Since `remember`, by either sign."""
        return self.was_counted() or bool(self.has_moved())

    def may_have_changed(self) -> bool:
        """`has_changed`; on an accelerator only what the host can tell, so that nobody waits."""
        is_near = all(t.device.type == "cpu" for t in self._tensors)
        return self.has_changed() if is_near else self.was_counted()

    def _counts(self) -> object:
        return [(t._version, t.data_ptr()) for t in self._tensors]

    @torch.no_grad()
    def _now(self) -> Tensor:
        if not self._measured:
            return torch.zeros(0)
        lengths = torch._foreach_norm(self._measured)
        device, is_mixed = lengths[0].device, len({n.dtype for n in lengths}) > 1
        found = torch.stack([n.to(device, torch.float64 if is_mixed else n.dtype) for n in lengths])
        return found.nan_to_num(nan=-1.0, posinf=torch.inf)  # what is not a number stays what it is
