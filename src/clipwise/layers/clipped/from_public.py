"""Constants for clipped layers, measured on public data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.given import require_module, require_takes
from clipwise.known import require_known
from clipwise.layers.clipped.layer import ClippedLayer
from clipwise.layers.clipped.maps import MapRole
from clipwise.layers.clipped.put_in import clip_inputs
from clipwise.layers.clipped.recurrent import ClippedRecurrent
from clipwise.layers.clipped.scales import BOUNDS, VECTORS, WEIGHTS, lengths
from clipwise.layers.clipped.set_clips import set_clips
from clipwise.layers.clipped.switch import measured

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

    `clip_inputs(model, **norms_from_public(model, loss, batch))` then clips about half of such examples. C1 is measured
    with the input clips of the layers before, C2 with all input clips, by the very norms that will be clipped: those of
    the weights, and of scale and shift where there are no weights. A layer with several of them takes the largest. (In
    mode "clip" a layer clips fewer, as far as later layers have clipped what comes back already.) The model itself
    stays as it is.

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
    probe = clip_inputs(copy.deepcopy(model), input_norm=_NO_LIMIT, grad_norm=_NO_LIMIT, bound=bound)
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    # The inputs of a layer depend on the clips before it: they settle from the first layer to the last.
    input_norm = dict.fromkeys(names, _NO_LIMIT)
    for _ in names:
        found = {
            name: _largest(each, quantile) for name, each in _measured(probe, loss, batch).inputs.items()
        }
        if found == input_norm:
            break
        input_norm = found
        set_clips(probe, input_norm=input_norm)
    ratios = _measured(probe, loss, batch).ratios
    grad_norm = {name: _largest(ratios[name], quantile, _NO_LIMIT) for name in names}
    return Norms(input_norm=input_norm, grad_norm=grad_norm)


@dataclass
class _Measured:
    """Of every layer, in a pass through the network: |x| of its inputs, and norm / bound of what comes back."""

    inputs: dict[str, list[Tensor]]
    ratios: dict[str, list[Tensor]]


def _measured(probe: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any]) -> _Measured:
    parameters = [p for p in probe.parameters() if p.requires_grad]
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    found = _Measured({name: [] for name in names}, {})
    of_kind: dict[str, dict[str, list[Tensor]]] = {
        kind: {name: [] for name in names} for kind in (WEIGHTS, VECTORS)
    }
    at: list[str] = []

    def watch(node: Any, g: Tensor) -> None:
        at[:] = [node.role.layer.name]
        if (x := _input(node)) is not None:
            found.inputs[at[0]].append(lengths(x))

    def compare(of: str, ratio_B: Tensor) -> None:
        of_kind[of][at[0]].append(ratio_B)

    losses = loss(probe, *batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ConfigurationError(
            "loss must give one loss an example, without a mean or a sum over the batch: use reduction='none'."
        )
    with measured(watch, compare):
        torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    # Biases are clipped to C2 as well. Where there are weights it is made for them.
    found.ratios = {name: of_kind[WEIGHTS][name] or of_kind[VECTORS][name] for name in names}
    return found


def _input(node: Any) -> Tensor | None:
    """What is clipped on the way in, examples first; nothing of embeddings and normalization layers."""
    if isinstance(node.role, MapRole):
        return node.role.map.of_input(node.saved_tensors[0])
    if isinstance(node.role.layer, ClippedRecurrent):
        x: Tensor = node.saved_tensors[0].movedim(node.axis, 0)
        return x
    return None


def _largest(each: list[Tensor], quantile: float, times: float = 1.0) -> float:
    """Of a layer that is used several times, or has several maps, the largest quantile."""
    if not each:
        return _UNUSED
    return min(_NO_LIMIT, max(_SMALLEST, *(times * float(norm_B.quantile(quantile)) for norm_B in each)))
