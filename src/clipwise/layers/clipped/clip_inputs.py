"""Wrap every trainable layer of a model in a clipped layer, and change the constants of clipped layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.batch_statistics import exchange_modules
from clipwise.layers.clipped.attention import ClippedAttention
from clipwise.layers.clipped.layer import BOUNDS, MODES, ClipConstants, ClippedLayer, clip_constant, has_code_of_its_own
from clipwise.layers.clipped.linear import ClippedConvolution, ClippedLinear
from clipwise.layers.clipped.normalization import ClippedEmbedding, ClippedGroupNorm, ClippedLayerNorm
from clipwise.layers.clipped.recurrent import ClippedRecurrent
from clipwise.validation.arguments import one_of, require_module, whole

Numbers = float | Mapping[str, float]

# By exact type: a subclass may compute something else. To support another layer, subclass `ClippedLayer`,
# `OneInputLayer` or `ClippedMapLayer` in this folder and add it here.
_KINDS: dict[type[nn.Module], Any] = {
    nn.Linear: ClippedLinear,
    nn.Conv1d: ClippedConvolution,
    nn.Conv2d: ClippedConvolution,
    nn.Conv3d: ClippedConvolution,
    nn.Embedding: ClippedEmbedding,
    nn.LayerNorm: ClippedLayerNorm,
    nn.GroupNorm: ClippedGroupNorm,
    nn.RNN: ClippedRecurrent,
    nn.LSTM: ClippedRecurrent,
    nn.GRU: ClippedRecurrent,
    nn.MultiheadAttention: ClippedAttention,
}


def clip_inputs(
    model: nn.Module,
    *,
    input_norm: Numbers,
    grad_norm: Numbers = 1.0,
    mode: str = "clip",
    bound: str = "gradient",
    uses: Mapping[str, int] | None = None,
) -> nn.Module:
    """Wrap every trainable layer of a model, in place, in a layer that clips its input and its upstream gradient.

    The parameters stay the same objects (an optimizer that holds them stays valid); their names get `.layer`. The input
    clips also apply in evaluation and export: they are part of the function that the network computes.

    Args:
        model: its trainable layers may be Linear, Conv1d to 3d, Embedding, LayerNorm, GroupNorm, RNN, LSTM, GRU and
            MultiheadAttention, without hooks. Layers without trainable parameters are not changed.
        input_norm: C1, the clipping norm of each example's layer input, in L2 over all positions. One number, or one
            per layer by name. Embeddings and normalization layers do not use it.
        grad_norm: C2, the clipping norm of each example's upstream gradient. One number, or one per layer by name.
        mode: "clip" scales longer gradients down; "normalize" also scales shorter ones up, so that only directions
            matter and the scale of the losses does not.
        bound: how the weight gradient is bounded. "gradient": from the upstream gradient together with the input.
            "upstream": from the norm of the upstream gradient alone, times C1, as in the paper. This bound is never
            smaller, so more is clipped at the same sensitivity.
        uses: the maximum number of uses of a layer per forward pass, by name, if above one. A public constant: the
            sensitivity grows with it.

    Returns:
        The model (another object only if the model itself is such a layer).
    """
    require_module(model)
    one_of("mode", mode, MODES)
    one_of("bound", bound, BOUNDS)
    uses = {} if uses is None else uses
    if not isinstance(uses, Mapping):
        raise ConfigurationError(
            f"uses must map layer names to their number of uses, such as {{'decoder': 2}}, not {uses!r}."
        )
    found = trainable_layers(model)
    inputs, gradients = _per_layer("input_norm", input_norm, found), _per_layer("grad_norm", grad_norm, found)
    counts = _per_layer("uses", {**dict.fromkeys(found, 1), **uses}, found)
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in found.items():
        norms = clip_constant("input_norm", inputs[name]), clip_constant("grad_norm", gradients[name])
        count = whole(f"uses[{name!r}]", counts[name], least=1)
        clipped = _KINDS[type(layer)](layer, ClipConstants(*norms, mode, bound), count, name)
        new[layer] = clipped.train(layer.training)
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False  # the fast path of evaluation would skip the clips
    return exchange_modules(model, new)


def set_clips(model: nn.Module, *, input_norm: Numbers | None = None, grad_norm: Numbers | None = None) -> None:
    """Change the constants of clipped layers, in place. Another C1 changes the function of the network.

    A private run continues with noise for the new constants from the next batch on. Constants must not change between
    the draw of a batch and its step. The choice costs no privacy if it depends only on public values (a schedule,
    public data) or released ones (weights, noised gradients, the remaining epsilon); never on private data.

    Args:
        model: what `clip_inputs` returned.
        input_norm: C1. One number for all layers, or a mapping from layer names for the layers to change.
        grad_norm: C2, in the same form.
    """
    require_module(model)
    # Parts of a model that were clipped separately may share names.
    layers: dict[str, list[ClippedLayer]] = {}
    for module in model.modules():
        if isinstance(module, ClippedLayer):
            layers.setdefault(module.name, []).append(module)
    if not layers:
        raise ConfigurationError("model has no clipped layers: call clip_inputs(model, ...) first.")
    changes: dict[str, dict[str, Any]] = {}
    for argument, given in (("input_norm", input_norm), ("grad_norm", grad_norm)):
        if given is None:
            continue
        for name, value in (given if isinstance(given, Mapping) else dict.fromkeys(layers, given)).items():
            if name not in layers:
                known = ", ".join(map(repr, layers))
                raise ConfigurationError(f"{argument}: there is no clipped layer {name!r}, only {known}.")
            changes.setdefault(name, {})[argument] = clip_constant(argument, value)
    if not changes:
        raise ConfigurationError("Give input_norm, grad_norm or both: there is nothing to set.")
    for name, values in changes.items():
        for layer in layers[name]:
            layer.constants = replace(layer.constants, **values)


def trainable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The trainable layers by name, each once. Refuses layers without a bound."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not any(p.requires_grad for p in module.parameters()):
            continue
        if isinstance(module, ClippedLayer):
            raise ConfigurationError(f"Layer {name!r} is clipped already: call clip_inputs once.")
        if type(module) in _KINDS:
            # A clipped layer computes from the weights and does not call the layer.
            if has_code_of_its_own(module):
                raise UnsupportedModelError(
                    f"Layer {name or 'model'!r} ({type(module).__name__}) has hooks or an overridden forward, which a "
                    "clipped layer would not call: remove them, or train with PerExample(max_norm=...). (weight_norm "
                    "and prune of torch.nn.utils are hooks too.)"
                )
            found[name] = module
            inside.update(module.modules())
        elif own := [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]:
            parameter = f"{name}.{own[0]}" if name else own[0]
            raise UnsupportedModelError(
                f"Parameter {parameter!r} belongs to a {type(module).__name__}, for which there is no bound: freeze "
                "it with requires_grad_(False), use one of the layers "
                f"{', '.join(kind.__name__ for kind in _KINDS)} instead, or train with PerExample(max_norm=...)."
            )
    if not found:
        raise ConfigurationError("model has no trainable layer to clip.")
    return found


def _per_layer(argument: str, given: Any, found: Mapping[str, nn.Module]) -> Mapping[str, Any]:
    """A value for each layer, from a mapping of all layers or one value for all."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(found, given)
    if unknown := [name for name in given if name not in found]:
        layers = ", ".join(map(repr, found))
        raise ConfigurationError(f"{argument}: there is no trainable layer {unknown[0]!r}, only {layers}.")
    if missing := [name for name in found if name not in given]:
        raise ConfigurationError(f"{argument}: give a number for layer {missing[0]!r} too, or one number for all.")
    return given
