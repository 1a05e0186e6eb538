"""Losses whose operations are known to treat each row of the outputs by itself.

Whether examples are coupled is found with a second backward pass, for any loss. For operations that cannot couple them,
such as those of the softmax cross-entropy, no pass is needed: it is enough that the gradient is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HALF = 2**63


@torch.no_grad()
def is_row_by_row(gradient: Tensor, losses: Tensor, outputs: Tensor, weights_B: Tensor) -> bool:
    """Whether `gradient`, that of sum_i w_i loss_i at the outputs, is made row by row by known operations.

    They are called one after another, without the engine of autograd and so without any hook, which could do anything
    to a gradient. What comes out has in row i nothing but row i of the outputs, and must be the same bit by bit. False
    means that nothing is known. It waits for the device.
    """
    found = weights_B
    node: Any = losses.grad_fn
    place = losses.output_nr
    while node is not outputs.grad_fn:
        is_known = _KNOWN.get(node.name()) if node is not None and place == 0 else None
        if is_known is None or not is_known(node, found):
            return False
        made = node(found)
        found = made[0] if isinstance(made, tuple) else made
        (node, place), *others = node.next_functions
        if any(other is not None for other, _ in others):
            return False
    return place == outputs.output_nr and gradient.shape == found.shape and gradient.equal(found)


def _is_nll_of_each(node: Any, gradient: Tensor) -> bool:
    """-z_{i, y_i} of each row i: not their sum or mean, and of rows, not of one vector."""
    return bool(node._saved_reduction == 0 and gradient.dim() == 1)


def _is_within_rows(node: Any, gradient: Tensor) -> bool:
    """Along another dimension than the first. Torch gives -1 as 2^64 - 1."""
    dim = node._saved_dim if node._saved_dim < _HALF else node._saved_dim - 2 * _HALF
    return bool(gradient.dim() > 1 and dim % gradient.dim() != 0)


def _is_by_number(node: Any, gradient: Tensor) -> bool:
    """Times or over a number of the code, such as a temperature."""
    other = node._saved_other
    return isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad


_KNOWN: dict[str, Callable[[Any, Tensor], bool]] = {
    "NllLossBackward0": _is_nll_of_each,
    "LogSoftmaxBackward0": _is_within_rows,
    "DivBackward0": _is_by_number,
    "MulBackward0": _is_by_number,
}
