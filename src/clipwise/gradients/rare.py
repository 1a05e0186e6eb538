"""Events that hardly ever happen, and whether one did.

An example that is not finite, or whose positions cancel, needs care that nearly no batch needs. To ask whether
there is one makes the host wait for the device; a captured step (compiled.py) cannot ask at all. It puts the
answers aside, goes on as if all were no, and looks at them before anything is released.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rare:
    """Asks at once."""

    def any(self, flags: Tensor) -> bool:
        """Whether any of the flags is set."""
        return bool(flags.any())


class PutAside(Rare):
    """Says no, and remembers the question."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []

    def any(self, flags: Tensor) -> bool:
        self._asked.append(flags.any())
        return False

    def happened(self) -> Tensor | None:
        """Whether any answer should have been yes, as a tensor on the device."""
        return torch.stack(self._asked).any() if self._asked else None
