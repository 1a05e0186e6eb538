"""Constants for clipped layers, measured on public data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.given import require_module, require_takes
from clipwise.known import require_known
from clipwise.layers.clipped.maps import Map, MapRole
from clipwise.layers.clipped.put_in import clip_inputs
from clipwise.layers.clipped.scales import BOUNDS, input_scales, lengths
from clipwise.layers.clipped.switch import unclipped

_NO_LIMIT = 1e10
_UNUSED = 1.0  # C1 of a layer whose input is not clipped
_SMALLEST = 1e-10


class Norms(TypedDict):
    """What `clip_inputs` takes, layer by layer."""

    input_norm: dict[str, float]
    grad_norm: dict[str, float]


def norms_from_public(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Sequence[Any],
    quantile: float = 0.5,
    bound: str = "gradient",
) -> Norms:
    """C1 and C2 of every layer: a quantile of the norms that public examples have there, at the present weights.

    `clip_inputs(model, **norms_from_public(model, loss, batch))` then clips about half of such examples. The model
    itself stays as it is.

    Args:
        model: not clipped yet.
        loss: `loss(model, *batch)` gives one loss an example.
        batch: public or synthetic rows, never private ones: what is measured is not noised.
        quantile: of the norms of the examples, between 0 and 1.
        bound: as `clip_inputs` will have it: what C2 is measured by.
    """
    require_known("bound", bound, BOUNDS)
    if isinstance(quantile, bool) or not 0 <= quantile <= 1:
        raise ConfigurationError(f"quantile={quantile!r} is not possible: give a number between 0 and 1.")
    require_module(model)
    if not isinstance(batch, (list, tuple)):
        raise ConfigurationError(
            f"batch must be a tuple of the loss's further arguments, such as (x, y), not {type(batch).__name__}."
        )
    require_takes("loss", loss, "loss(model, *batch)", model, *batch)
    probe = clip_inputs(copy.deepcopy(model), input_norm=_NO_LIMIT, grad_norm=_NO_LIMIT)
    names = [name for name, p in probe.named_parameters() if p.requires_grad]
    found = Norms(input_norm={}, grad_norm={})

    def measure(node: Any, g: Tensor) -> None:
        role = node.role
        if isinstance(role, MapRole):
            seen, *_ = node.saved_tensors
            x = role.map.of_input(seen)
            inputs_B, upstream_B = lengths(x), _upstream(role.map, g, x, bound, quantile)
        else:
            inputs_B, upstream_B = None, lengths(g.movedim(node.axis, 0))
        _keep(found["input_norm"], role.layer.name, inputs_B, quantile)
        _keep(found["grad_norm"], role.layer.name, upstream_B, quantile)

    losses = loss(probe, *batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ConfigurationError(
            "loss must give one loss an example, without a mean or a sum over the batch: use reduction='none'."
        )
    with unclipped(measure):
        parameters = dict(probe.named_parameters())
        torch.autograd.grad(losses.sum(), [parameters[n] for n in names], allow_unused=True)
    return found


def _upstream(of: Map, g: Tensor, x: Tensor, bound: str, quantile: float) -> Tensor:
    """What the clip compares with C2: n(g), or n(g, x) / C1 for the input as it will be, clipped to C1."""
    if bound == "upstream":
        return of.upstream_norm(g, of.over_positions(g.abs()), x.shape)
    norm_B = lengths(x)
    input_norm = max(_SMALLEST, float(norm_B.quantile(quantile)))
    return of.gradient_norm(g, of.position_lengths(x)) * input_scales(norm_B, input_norm) / input_norm


def _keep(norms: dict[str, float], name: str, norm_B: Tensor | None, quantile: float) -> None:
    """Of a layer that is used several times, or has several maps, the largest."""
    here = _UNUSED if norm_B is None else max(_SMALLEST, float(norm_B.quantile(quantile)))
    norms[name] = max(norms.get(name, 0.0), here)
