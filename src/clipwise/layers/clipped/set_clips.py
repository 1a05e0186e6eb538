"""Other constants for layers that are clipped already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.layers.clipped.layer import ClippedLayer
from clipwise.layers.clipped.put_in import Numbers
from clipwise.layers.clipped.scales import number
from clipwise.validation.arguments import require_module


def set_clips(
    model: nn.Module, *, input_norm: Numbers | None = None, grad_norm: Numbers | None = None
) -> None:
    """Give clipped layers other constants, in place. With another C1 the network is another function.

    A private run goes on: its noise follows from the next batch on. Between the draw of a batch and its step constants
    must stay. They cost no privacy as long as they are chosen by what is public (a schedule, public data) or was
    released (weights, noised gradients, the epsilon that is left); never by private data.

    Args:
        model: what `clip_inputs` returned.
        input_norm: C1. One number for all layers, or one for each layer that is to change, by name.
        grad_norm: C2; the same.
    """
    require_module(model)
    layers: dict[
        str, list[ClippedLayer]
    ] = {}  # parts of a model that were clipped one by one may share names
    for module in model.modules():
        if isinstance(module, ClippedLayer):
            layers.setdefault(module.name, []).append(module)
    if not layers:
        raise ConfigurationError("model has no clipped layers: call clip_inputs(model, ...) first.")
    changes: dict[str, dict[str, float]] = {}
    for argument, given in (("input_norm", input_norm), ("grad_norm", grad_norm)):
        if given is None:
            continue
        by_layer = given if isinstance(given, Mapping) else dict.fromkeys(layers, given)
        for name, value in by_layer.items():
            if name not in layers:
                known = ", ".join(map(repr, layers))
                raise ConfigurationError(f"{argument}: there is no clipped layer {name!r}, only {known}.")
            changes.setdefault(name, {})[argument] = number(argument, value)
    if not changes:
        raise ConfigurationError("Give input_norm, grad_norm or both: there is nothing to set.")
    for name, values in changes.items():
        for layer in layers[name]:
            has = layer.constants
            layer.constants = replace(
                has,
                input_norm=values.get("input_norm", has.input_norm),
                grad_norm=values.get("grad_norm", has.grad_norm),
            )
