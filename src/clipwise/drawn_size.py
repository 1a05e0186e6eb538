"""Losses that are divided by the number of examples drawn.

    sum_i clip(g_i / B)

Where an example is not clipped its part follows B, so that one record more or less moves the parts of all others. No
gradient shows it, and a batch of one size does not either. The numbers in the graphs of two batches do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.walk import Node

_SCALES = ("DivBackward0", "MulBackward0")
_NEAR = 1e-5  # relative: 1 / B may be rounded in float32


class DrawnSize:
    """Refuses losses in whose graph a factor is the size of the batch, for two batches of different sizes.

    A lint, not a proof: it sees plain numbers, on the first batches. A constant that happens to be the size of one
    batch is not that of the other.
    """

    def __init__(self) -> None:
        self._sizes: set[int] = set()
        self._places: set[int] | None = None

    def examine(self, losses: Tensor) -> None:
        """Look at the factors of one batch, until they are known to be constants."""
        size = len(losses)
        if self._places == set() or size < 2 or size in self._sizes or losses.grad_fn is None:
            return
        places = _places_of(size, losses.grad_fn)
        self._sizes.add(size)
        if self._places is None:
            self._places = places
            return
        self._places &= places
        if self._places:
            self._places, self._sizes = None, set()  # who tries again is looked at again
            raise CoupledExamplesError(
                "losses are divided by the number of examples in the batch, which is drawn and secret: with one record "
                "more or less the losses of all others would change. private.step divides by a constant of its own: "
                "leave the division out."
            )


def _places_of(size: int, root: Node) -> set[int]:
    """Which operations on losses, counted from the last on, multiply or divide by the size."""
    nodes, entered = [root], {None, root}
    for node in nodes:  # grows on the way, but not behind what makes losses of outputs
        for child, index in node.next_functions:
            if child not in entered and tuple(child._input_metadata[index].shape) == (size,):
                entered.add(child)
                nodes.append(child)
    return {place for place, node in enumerate(nodes) if node.name() in _SCALES and _is_scaled_by(size, node)}


def _is_scaled_by(size: int, node: Node) -> bool:
    return any(
        abs(factor - wanted) <= _NEAR * wanted
        for factor in (_number(node, "_saved_other"), _number(node, "_saved_self"))
        if factor is not None
        for wanted in (size, 1 / size)
    )


def _number(node: Node, name: str) -> float | None:
    """A plain number that the operation took, as the 8 of x / 8."""
    value: Any = getattr(node, name, None)
    if isinstance(value, Tensor):
        is_plain = value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
        value = value.item() if is_plain else None
    return float(value) if isinstance(value, (int, float)) else None
