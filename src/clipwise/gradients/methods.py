"""The methods for per-example gradients, by name. All give the same norms and sums at different cost.

`auto` uses book-keeping, the faster method, if memory allows (free_memory.py), and two passes that keep nothing
otherwise. It decides once per kind of graph, batch size and sizes at the two ends of the graph. A batch with probed
layouts already has its output gradients in memory and always uses book-keeping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.examples import Parameters, PerExampleGradients, written_out
from clipwise.gradients.plain import by_loop, by_vmap
from clipwise.gradients.reweight import Reweighted
from clipwise.gradients.stream import Memory, Stream


def by_choice(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Book-keeping or reweighting, depending on free memory."""
    stream = Stream(losses, parameters, memory)
    found = stream.collected_if_possible()
    return Reweighted(stream, len(losses), memory) if found is None else found


def by_bookkeeping(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass that keeps the output gradients for norms and sums (ghost clipping). Frees the graph."""
    return Stream(losses, parameters, memory).collected()


def by_reweighting(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Norms from one backward pass and sums from another."""
    return Reweighted(Stream(losses, parameters, memory), len(losses), memory)


def by_instantiating(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass that writes out B gradients per parameter, and recomputes those that memory cannot hold."""
    found = Stream(losses, parameters, memory).gradients()
    by_parameter = found.by_parameter.items()
    written = {name: written_out(name, parameters[name], c.form.dtype, [c]) for name, c in by_parameter}
    return PerExampleGradients(found.batch, written)


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
    """The gradient of each loss. `losses` is a vector with one loss per example; its graph may be freed."""
    if len(losses) == 1:
        return by_loop(losses, parameters)  # one plain gradient; no layout is needed
    if method in _FROM_THE_GRAPH:
        return _FROM_THE_GRAPH[method](losses, parameters, memory)
    found = _BY_AUTOGRAD[method](losses, parameters)
    written = found.instantiate(slice(0, found.batch)).values()
    all_finite = all(bool(torch.isfinite(g).all()) for g in written)
    return found if all_finite else by_bookkeeping(losses, parameters, memory)
