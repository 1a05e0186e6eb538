"""Per-example gradients by plain autograd: one backward pass per example, or one batched pass.

Both multiply the rows of the other examples by 0, and 0 * NaN is NaN. So if an example is not finite, only book-keeping
separates the others from it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.real_views import own_part_of_gradient
from clipwise.gradients.walk import walk

_CHUNK_BYTES = 256 * 2**20  # gradients returned by one batched backward pass


def single(losses: Tensor, example: int, parameters: Parameters, weight: float = 1) -> dict[str, Tensor]:
    """The gradient of one weighted loss."""
    one = torch.zeros_like(losses)
    one[example] = weight
    grads = torch.autograd.grad(losses, list(parameters.values()), one, retain_graph=True, materialize_grads=True)
    own = (own_part_of_gradient(g, p) for g, p in zip(grads, parameters.values(), strict=True))
    return {name: g.to_dense() for name, g in zip(parameters, own, strict=True)}


@torch.no_grad()
def by_loop(losses: Tensor, parameters: Parameters) -> PerExampleGradients:
    """The reference method: one backward pass for each example."""
    walk(losses, parameters)  # raises for parameters that take no part in the losses
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(len(losses)):
        for name, g in single(losses, i, parameters).items():
            rows[name].append(g)
    stacked = {name: torch.stack(g) if len(g) > 1 else g[0][None] for name, g in rows.items()}
    return PerExampleGradients.written(stacked, parameters)


@torch.no_grad()
def by_vmap(losses: Tensor, parameters: Parameters) -> PerExampleGradients:
    """One backward pass with a batch of output gradients e_1 .. e_B; a loop if torch cannot batch it."""
    walk(losses, parameters)
    ones_BB = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    bytes_each = sum(p.numel() * p.element_size() for p in parameters.values())
    step = max(1, _CHUNK_BYTES // max(1, bytes_each))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop.*")  # no batched form
            chunks = [_batched(losses, parameters, e_bB) for e_bB in torch.split(ones_BB, step)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an operation that cannot be batched, such as a custom function
        return by_loop(losses, parameters)
    return PerExampleGradients.written({name: torch.cat([c[name] for c in chunks]) for name in parameters}, parameters)


def _batched(losses: Tensor, parameters: Parameters, weights_bB: Tensor) -> dict[str, Tensor]:
    """The gradients of several weighted sums of the losses: [b, *shape]."""
    grads = torch.autograd.grad(
        losses, list(parameters.values()), weights_bB, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    return {
        name: torch.zeros_like(p).expand(len(weights_bB), *p.shape) if g is None else g
        for (name, p), g in zip(parameters.items(), grads, strict=True)
    }
