"""Clipping constants measured on public data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

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

_Norms = dict[str, list[Tensor]]  # of each layer, for each of its uses
_NO_LIMIT = 1e10
_UNUSED = 1.0  # C1 of a layer whose input is not clipped
_SMALLEST = 1e-10  # constant that `clip_inputs` accepts; norms are upper bounds, and that of 0 may be 1e-18


class Norms(TypedDict):
    """Arguments for `clip_inputs`, per layer."""

    input_norm: dict[str, float]
    grad_norm: dict[str, float]


def norms_from_public(
    model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any], quantile: float = 0.5, bound: str = "gradient"
) -> Norms:
    """C1 and C2 of every layer: a quantile of the norms of public examples at the current weights.

    `clip_inputs(model, **norms_from_public(model, loss, batch))` then clips about half of such examples. C1 is measured
    with the input clips of the previous layers, C2 with all input clips. C2 uses the norms that are clipped later:
    those of the weights, or of scale and shift if there are no weights. A layer with several of them takes the largest.
    (In mode "clip" a layer clips fewer examples, because later layers have already clipped the gradient.) Examples with
    a non-finite layer input, loss or gradient are left out. The model is not changed.

    Args:
        model: not clipped yet.
        loss: `loss(model, *batch)` returns one loss per example.
        batch: public or synthetic rows, never private ones: the measured norms get no noise.
        quantile: of the examples' norms, between 0 and 1.
        bound: the same as for `clip_inputs`; it decides which norms C2 is measured from.
    """
    one_of("bound", bound, BOUNDS)
    quantile = number("quantile", quantile, least=0, most=1)
    require_module(model)
    if not isinstance(batch, (list, tuple)):
        raise ConfigurationError(
            f"batch must be a tuple of the loss's further arguments, such as (x, y), not {type(batch).__name__}."
        )
    require_takes("loss", loss, "loss(model, *batch)", model, *batch)
    trainable_layers(model)  # validates before the copy: the state of hooks may not be copyable
    probe = clip_inputs(copy.deepcopy(model), input_norm=_NO_LIMIT, grad_norm=_NO_LIMIT, bound=bound)
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    # The inputs of a layer depend on the clips of previous layers: they converge from the first layer to the last.
    input_norm = dict.fromkeys(names, _NO_LIMIT)
    for _ in names:
        inputs, _ = _measured(probe, loss, batch)
        found = {name: _constant(each, quantile, f"what goes into layer {name!r}") for name, each in inputs.items()}
        if found == input_norm:
            break
        input_norm = found
        set_clips(probe, input_norm=input_norm)
    _, ratios = _measured(probe, loss, batch)
    grad_norm = {
        name: _constant(ratios[name], quantile, f"what comes back to layer {name!r}", times=_NO_LIMIT) for name in names
    }
    return Norms(input_norm=input_norm, grad_norm=grad_norm)


def _measured(probe: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any]) -> tuple[_Norms, _Norms]:
    """Per layer, |x| of its inputs and norm / bound of its upstream gradients, for each finite example."""
    parameters = [p for p in probe.parameters() if p.requires_grad]
    names = [m.name for m in probe.modules() if isinstance(m, ClippedLayer)]
    inputs: _Norms = {name: [] for name in names}
    of_kind: dict[str, _Norms] = {kind: {name: [] for name in names} for kind in (WEIGHTS, VECTORS)}
    at = ""

    def watch(node: Any, g: Tensor) -> None:
        nonlocal at
        at = node.role.layer.name
        if node.examples != len(losses):
            # Otherwise its norms are not per example, and `Backprop` would refuse it too.
            raise ConfigurationError(
                f"batch: layer {at!r} got another number of rows than there are losses, and norms are measured per "
                "example: keep the examples along the first dimension of every layer input."
            )
        inputs[at] += [lengths(x) for x in _inputs(node)]

    def compare(of: str, ratio_B: Tensor) -> None:
        of_kind[of][at].append(ratio_B)

    with torch.enable_grad(), noting() as factors:
        losses = _losses(probe, loss, batch)
        with measured(watch, compare):
            torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    # Biases are clipped to C2 too, but if a layer has weights, C2 is chosen for them.
    ratios = {name: of_kind[WEIGHTS][name] or of_kind[VECTORS][name] for name in names}
    for name, each in ratios.items():
        if not each:
            raise ConfigurationError(
                f"loss: layer {name!r} takes no part in the losses, so its norms cannot be measured. "
                "Freeze it with requires_grad_(False), or use it in the forward pass, without detach()."
            )
    finite_B = _finite(losses, factors)
    if not bool(finite_B.any()):
        raise ConfigurationError(
            f"batch: no example has finite inputs, loss and gradients, so the norms of layer {names[0]!r}, and of all "
            "others, cannot be measured: look at the rows, the loss and the weights."
        )
    return _chosen(inputs, finite_B), _chosen(ratios, finite_B)


def _losses(probe: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Any]) -> Tensor:
    with naming("batch", "loss(model, *batch)"):
        losses = loss(probe, *batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ConfigurationError(
            "loss must return one loss per example, without a mean or a sum over the batch: use reduction='none'."
        )
    if not len(losses):
        raise ConfigurationError("batch holds no example: give public rows to measure norms on.")
    if not losses.requires_grad:
        raise ConfigurationError("loss must return losses with a gradient: leave out detach() and torch.no_grad().")
    return losses


def _finite(losses: Tensor, factors: list[Tensor]) -> Tensor:
    """Which examples have a finite loss and no layer factor of 0, which marks what is not finite."""
    finite_B = torch.isfinite(losses.detach()).cpu()
    for factor_B in factors:
        if len(factor_B) == len(finite_B):  # layers that do not lead to the losses may have other rows
            finite_B &= factor_B.cpu() > 0
    return finite_B


def _chosen(found: _Norms, which_B: Tensor) -> _Norms:
    return {name: [norm_B.cpu()[which_B] for norm_B in each] for name, each in found.items()}


def _inputs(node: Any) -> list[Tensor]:
    """The clipped inputs of a node, examples first; none for embeddings and normalization layers."""
    if isinstance(node.role, MapRole):
        return [node.role.map.of_input(x) for x in node.saved_tensors[: -1 : len(Seen._fields)]]
    if isinstance(node.role.layer, ClippedRecurrent):
        return [node.saved_tensors[0].movedim(node.axis, 0)]
    return []


def _constant(each: list[Tensor], quantile: float, of: str, times: float = 1.0) -> float:
    """The quantile of the norms; the largest one if a layer has several uses or maps. `of` is for messages."""
    if not each:
        return _UNUSED
    found = max(times * float(norm_B.quantile(quantile)) for norm_B in each)
    if found < _SMALLEST:
        raise ConfigurationError(
            f"batch: {of} is 0 or nearly 0 in too many examples: the quantile {quantile:g} of its norms "
            f"is below {_SMALLEST:g}, the smallest possible constant. Look at the rows, the loss and the "
            "weights, give a larger quantile, or choose constants for clip_inputs yourself."
        )
    return min(_NO_LIMIT, found)
