"""How an operation without a bound is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from clipwise.errors import UnsupportedModelError

DOT_PRODUCTS = (
    "attention by dot products has no bounded slope: take clipwise.layers.L2Attention, "
    "which attends by distances"
)
WEIGHTS = "a product with weights is bounded as a layer: take nn.Linear"
UNKNOWN = "no bound is known for it: take an operation that has one, or another strategy"


def refusal(name: str, what: Any, reason: str) -> UnsupportedModelError:
    """What is raised for an operation without a bound."""
    if isinstance(what, nn.Module):
        called = f"{name or 'model'!r} ({type(what).__name__})"
    else:
        called = f"{name!r} ({what if isinstance(what, str) else getattr(what, '__name__', what)})"
    return UnsupportedModelError(f"Lipschitz bounds: {called}: {reason}.")


def own_dimension(name: str, dim: int, ndim: int) -> int:
    """A dimension of the batch as one of an example; the batch itself is refused. `ndim` is that of an example."""
    found = dim if dim >= 0 else dim + ndim + 1
    if not 1 <= found <= ndim:
        raise UnsupportedModelError(
            f"Lipschitz bounds: {name!r} works along dimension {dim}, which holds the examples of the batch: "
            "each example must be treated by itself."
        )
    return found - 1


def require_own_padding(name: str, pad: Sequence[int], shape: Sequence[int]) -> None:
    """Refuse padding that reaches the dimension of the examples: (1, -1) there moves each to the next one's place."""
    if len(pad) > 2 * len(shape):
        raise UnsupportedModelError(
            f"Lipschitz bounds: {name!r} pads the dimension that holds the examples of the batch: give two numbers for "
            f"each dimension of an example, which has the shape {tuple(shape)}, and no more."
        )
