"""Rare events, and whether one happened.

An example that is not finite, or with positions that cancel, needs extra work that hardly any batch needs. Checking for
one makes the host wait for the device, and a captured step (compiled.py) cannot check at all. It defers the checks,
continues as if all were negative, and evaluates them before anything is released.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rare:
    """Checks immediately."""

    def any(self, flags: Tensor) -> bool:
        """Whether any of the flags is set."""
        return bool(flags.any())


class PutAside(Rare):
    """Returns False, and stores the flags for later."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []

    def any(self, flags: Tensor) -> bool:
        self._asked.append(flags.any())
        return False

    def happened(self) -> Tensor | None:
        """Whether any deferred check was positive, as a tensor on the device."""
        return torch.stack(self._asked).any() if self._asked else None
