"""Losses that repeat each example's outputs for the targets of all others.

Outputs (B, 1) minus targets (B,) are (B, B): every loss then depends on everybody's targets. A gradient at the outputs
does not show it, because no output meets another one. The shapes in the graph do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.walk import Node

Shape = Sequence[int]


class RepeatedOutputs:
    """Refuses losses in whose graph values get a second dimension as long as the batch.

    A public size (10 thresholds, say) may happen to be that of a batch. Operations that made no such dimension for a
    batch of another size are not asked again.
    """

    def __init__(self) -> None:
        self._harmless: set[tuple[str, ...]] = set()

    def require_none(self, losses: Tensor, outputs: Tensor) -> None:
        """Look at every operation between the outputs and the losses."""
        if len(losses) < 2 or losses.grad_fn is None:
            return
        nodes = _between(losses.grad_fn, outputs.grad_fn)
        wiring = tuple(node.name() for node in nodes)
        if wiring in self._harmless:
            return
        sizes = {len(losses), len(outputs)}
        for node in nodes:
            taken = [child._input_metadata[i].shape for child, i in node.next_functions if child is not None]
            for made in (m.shape for m in node._input_metadata):
                if taken and _is_repeated(made, taken, sizes):
                    raise CoupledExamplesError(
                        f"losses: {node.name().removesuffix('Backward0')} makes one entry for each pair of examples, "
                        "so that the loss of one depends on the targets of all. Usual cause: outputs of the shape (B, "
                        "1) and targets of the shape (B,): give targets the shape of the outputs. (If a dimension of "
                        "yours happens to be as long as the batch, take another batch size.)"
                    )
        self._harmless.add(wiring)


def _between(root: Node, end: Node | None) -> list[Node]:
    found, entered = [] if root is end else [root], {None, root, end}
    for node in found:  # grows on the way
        for child, _ in node.next_functions:
            if child not in entered:
                entered.add(child)
                found.append(child)
    return found


def _is_repeated(made: Shape, taken: Sequence[Shape], sizes: set[int]) -> bool:
    """More numbers than any operand has, and more dimensions as long as the batch."""
    found = _count(made, sizes)
    return found > 1 and all(math.prod(made) > math.prod(t) and found > _count(t, sizes) for t in taken)


def _count(shape: Shape, sizes: set[int]) -> int:
    return sum(n in sizes for n in shape)
