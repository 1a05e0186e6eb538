"""Constants for clipped layers, measured on public data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.layers.clipped.clip_inputs import clip_inputs, set_clips, trainable_layers
from clipwise.layers.clipped.layer import ClippedLayer
from clipwise.layers.clipped.linear_map import MapRole, Seen
from clipwise.layers.clipped.recurrent import ClippedRecurrent
from clipwise.layers.clipped.scales import BOUNDS, VECTORS, WEIGHTS, lengths
from clipwise.layers.clipped.switch import measured, noting
from clipwise.validation.arguments import naming, number, one_of, require_module, require_takes

_NO_LIMIT = 1e10
_UNUSED = 1.0  # C1 of a layer whose input is not clipped
_SMALLEST = 1e-10  # that `clip_inputs` takes; norms are upper bounds, and that of 0 may show as 1e-18


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
    mode "clip" a layer clips fewer, as far as later layers have clipped what comes back already.) Examples
    that are not finite, in a layer's input, their loss or a gradient, are left out. The model itself stays as
    it is.

    Args:
        model: not clipped yet.
        loss: `loss(model, *batch)` gives one loss an example.
        batch: public or synthetic rows, never private ones: what is measured is not noised.
        quantile: of the norms of the examples, between 0 and 1.
        bound: as `clip_inputs` will have it: what C2 is measured by.
    """
    one_of("bound", bound, BOUNDS)
    quantile = number("quantile", quantile, least=0)
    if quantile > 1:
        raise ConfigurationError(f"quantile={quantile!r} is not possible: give a number between 0 and 1.")
    require_module(model)
    if not isinstance(batch, (list, tuple)):
        raise ConfigurationError(
            f"batch must be a tuple of the loss's further arguments, such as (x, y), not {type(batch).__name__}."
        )
    require_takes("loss", loss, "loss(model, *batch)", model, *batch)
    trainable_layers(model)  # refused before it is copied: what hooks keep may not go into a copy
    probe = clip_inputs(copy.deepcopy(model), input_norm=_NO_LIMIT, grad_norm=_NO_LIMIT, bound=bound)
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    # The inputs of a layer depend on the clips before it: they settle from the first layer to the last.
    input_norm = dict.fromkeys(names, _NO_LIMIT)
    for _ in names:
        inputs = _measured(probe, loss, batch).inputs
        found = {
            name: _constant(each, quantile, f"what goes into layer {name!r}") for name, each in inputs.items()
        }
        if found == input_norm:
            break
        input_norm = found
        set_clips(probe, input_norm=input_norm)
    ratios = _measured(probe, loss, batch).ratios
    grad_norm = {
        name: _constant(ratios[name], quantile, f"what comes back to layer {name!r}", times=_NO_LIMIT)
        for name in names
    }
    return Norms(input_norm=input_norm, grad_norm=grad_norm)


class _Measured(NamedTuple):
    """Of every layer, in a pass through the network: |x| of its inputs, and norm / bound of what comes back.

    Both have one number for each example that is finite.
    """

    inputs: dict[str, list[Tensor]]
    ratios: dict[str, list[Tensor]]


def _measured(probe: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any]) -> _Measured:
    parameters = [p for p in probe.parameters() if p.requires_grad]
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    inputs: dict[str, list[Tensor]] = {name: [] for name in names}
    of_kind: dict[str, dict[str, list[Tensor]]] = {
        kind: {name: [] for name in names} for kind in (WEIGHTS, VECTORS)
    }
    at = ""

    def watch(node: Any, g: Tensor) -> None:
        nonlocal at
        at = node.role.layer.name
        if node.examples != len(losses):
            # Otherwise its norms are those of something else, and `Backprop` would refuse it too.
            raise ConfigurationError(
                f"batch: layer {at!r} was given more or fewer rows than there are losses, and its norms must be those of "
                "examples: keep the examples along the first dimension of everything that goes into a layer."
            )
        inputs[at] += [lengths(x) for x in _inputs(node)]

    def compare(of: str, ratio_B: Tensor) -> None:
        of_kind[of][at].append(ratio_B)

    with torch.enable_grad(), noting() as factors:
        losses = _losses(probe, loss, batch)
        with measured(watch, compare):
            torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    # Biases are clipped to C2 as well. Where there are weights it is made for them.
    ratios = {name: of_kind[WEIGHTS][name] or of_kind[VECTORS][name] for name in names}
    for name, each in ratios.items():
        if not each:
            raise ConfigurationError(
                f"loss: layer {name!r} takes no part in the losses, so that its norms cannot be measured. "
                "Freeze it with requires_grad_(False), or use it in the forward pass, without detach()."
            )
    finite_B = _finite(losses, factors)
    if not bool(finite_B.any()):
        raise ConfigurationError(
            "batch: every example is not finite, in its inputs, its loss or a gradient, so that the norms of "
            f"layer {names[0]!r}, and of all others, cannot be measured: look at the rows, the loss and the "
            "weights."
        )
    return _Measured(_chosen(inputs, finite_B), _chosen(ratios, finite_B))


def _losses(probe: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any]) -> Tensor:
    with naming("batch", "loss(model, *batch)"):
        losses = loss(probe, *batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ConfigurationError(
            "loss must give one loss an example, without a mean or a sum over the batch: use reduction='none'."
        )
    if not len(losses):
        raise ConfigurationError("batch holds no example: give public rows to measure norms on.")
    if not losses.requires_grad:
        raise ConfigurationError(
            "loss must give losses with a gradient: leave out detach() and torch.no_grad() on the way there."
        )
    return losses


def _finite(losses: Tensor, factors: list[Tensor]) -> Tensor:
    """Which examples have a finite loss, and no layer scales by 0: so layers treat what is not finite."""
    finite_B = torch.isfinite(losses.detach()).cpu()
    for factor_B in factors:
        if len(factor_B) == len(finite_B):  # layers off the way to the losses may have had other rows
            finite_B &= factor_B.cpu() > 0
    return finite_B


def _chosen(found: dict[str, list[Tensor]], which_B: Tensor) -> dict[str, list[Tensor]]:
    return {name: [norm_B.cpu()[which_B] for norm_B in each] for name, each in found.items()}


def _inputs(node: Any) -> list[Tensor]:
    """What is clipped on the way in, examples first; nothing of embeddings and normalization layers."""
    if isinstance(node.role, MapRole):
        return [node.role.map.of_input(x) for x in node.saved_tensors[: -1 : len(Seen._fields)]]
    if isinstance(node.role.layer, ClippedRecurrent):
        return [node.saved_tensors[0].movedim(node.axis, 0)]
    return []


def _constant(each: list[Tensor], quantile: float, of: str, times: float = 1.0) -> float:
    """Of a layer that is used several times, or has several maps, the largest quantile; `of` says of what."""
    if not each:
        return _UNUSED
    found = max(times * float(norm_B.quantile(quantile)) for norm_B in each)
    if found < _SMALLEST:
        raise ConfigurationError(
            f"batch: {of} is 0, or next to it, in too many examples: the quantile {quantile:g} of its norms "
            f"is below {_SMALLEST:g}, the least that can be clipped to. Look at the rows, the loss and the "
            "weights, give a larger quantile, or choose constants for clip_inputs yourself."
        )
    return min(_NO_LIMIT, found)
