"""The ways to find per-example gradients, by name. All give the same norms and sums; they differ in cost."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.bookkeeping import Memory
from clipwise.gradients.choosing import by_choice
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.instantiate import by_instantiating
from clipwise.gradients.plain import by_loop, by_vmap
from clipwise.gradients.reweight import by_reweighting
from clipwise.gradients.stream import by_bookkeeping

_FROM_THE_GRAPH = {
    "auto": by_choice,
    "bookkeeping": by_bookkeeping,
    "reweight": by_reweighting,
    "instantiate": by_instantiating,
}
_BY_AUTOGRAD = {"vmap": by_vmap, "loop": by_loop}

METHODS = (*_FROM_THE_GRAPH, *_BY_AUTOGRAD)


def per_example_gradients(
    losses: Tensor, parameters: Parameters, memory: Memory, method: str = "auto"
) -> PerExampleGradients:
    """The gradient of each loss; `losses` is a vector with one loss an example, whose graph may be freed."""
    if len(losses) == 1:
        return by_loop(losses, parameters)  # the plain gradient, and nothing to lay out
    if method in _FROM_THE_GRAPH:
        return _FROM_THE_GRAPH[method](losses, parameters, memory)
    found = _BY_AUTOGRAD[method](losses, parameters)
    return found if _all_finite(found) else by_bookkeeping(losses, parameters, memory)


def _all_finite(found: PerExampleGradients) -> bool:
    written = found.instantiate(slice(0, found.batch)).values()
    return all(bool(torch.isfinite(g).all()) for g in written)
