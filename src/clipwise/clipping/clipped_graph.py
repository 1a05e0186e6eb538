"""Checks of the autograd graph for backpropagation clipping.

Every path from a loss to a trainable parameter must end in a clipped layer, each layer must be used at most as often as
declared, and its rows must be the examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError, StepError, UnsupportedModelError
from clipwise.gradients.layout import Layout, Probe, probe_weights
from clipwise.gradients.outline import require_not_rerun
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Node, graph_nodes
from clipwise.layers.clipped import ClippedLayer, unclipped

_TOO_FEW = 2  # the largest group size of a normalization that is refused in mode="normalize"
Wiring = int  # a hash of the sequence of operations in a graph


def clipped_nodes(
    losses: Tensor, parameters: Mapping[str, Tensor], layers: Iterable[ClippedLayer]
) -> tuple[list[Node], Wiring]:
    """The nodes of clipped layers in the graph of the losses, and a hash of the graph.

    Raises if a parameter is used outside of its clipped layer in `layers`.
    """
    names = {id(p): name for name, p in parameters.items()}
    known = set(map(id, layers))
    normalizes = any(layer.constants.mode == "normalize" for layer in layers)
    root: Node = losses.grad_fn
    entered, stack, found = {root}, [root], []
    kinds: list[object] = []
    few: list[Node] = []
    while stack:
        node = stack.pop()
        layer = _layer_of(node)
        require_not_rerun(node.name())
        kinds.append(node.name() if layer is None else (layer.name, node.role.name))
        if layer is not None:
            found.append(node)
        if normalizes and _together(node) <= _TOO_FEW:
            few.append(node)
        for slot, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            variable = getattr(child, "variable", None)
            if (name := names.get(id(variable))) is None:
                pass
            elif layer is not None and id(layer) not in known:
                raise UnsupportedModelError(
                    f"Parameter {name!r} is used by a clipped layer {layer.name!r} that is not in the model of this "
                    "run: call clip_inputs once, and pass the whole model to make_private."
                )
            elif not _bounds(layer, slot, variable):
                by = type(node).__name__ if layer is None else f"layer {layer.name!r}, as its input"
                raise UnsupportedModelError(
                    f"Parameter {name!r} is used outside of its clipped layer, by {by}, where its gradient is not "
                    "bounded. Use it only in its layer. Pass a penalty on the weights as make_private(..., penalty=f), "
                    "or use the optimizer's weight_decay. torch.compile removes the clips of a model: use "
                    "private.compiled(loss) instead."
                )
            if child not in entered:
                entered.add(child)
                stack.append(child)
    for node in few:
        _require_nothing_behind(node, names)
    for node in found:
        name = node.role.layer.name
        if not node.role.is_present:
            raise StepError(
                f"The constants of layer {name!r} changed after these losses were computed, so the noise does not fit "
                "them. Compute the losses of the batch that was drawn last."
            )
        if node.examples != len(losses):
            raise StepError(
                f"Layer {name!r} clips rows, but the number of its rows is not that of the losses. Keep the examples "
                "in the first dimension of every input, and do not use augmentation_multiplicity."
            )
    for (layer, _), count in Counter((node.role.layer, node.role.name) for node in found).items():
        if count > layer.uses:
            raise UnsupportedModelError(
                f"Layer {layer.name!r} is used more than {layer.uses} times in one forward pass, the number in its "
                f"sensitivity. Pass clip_inputs(..., uses={{{layer.name!r}: n}}) with the largest possible number n."
            )
    return found, hash(tuple(kinds))


def require_rows_of_examples(losses: Tensor, nodes: list[Node], parameters: Mapping[str, Tensor]) -> None:
    """Probe that row i of every clipped layer belongs to example i (gradients/layout.py)."""
    weights_B = probe_weights(len(losses), losses)
    seen: list[dict[Node, Tensor]] = []
    ones_B = torch.ones_like(losses)
    # For kernels with a nondeterministic order of additions, a third pass measures rounding (gradients/layout.py).
    for w in (ones_B, weights_B, 3 * ones_B)[: 2 if losses.device.type == "cpu" else 3]:
        gradients: dict[Node, Tensor] = {}
        with unclipped(gradients.__setitem__), ieee_arithmetic():
            torch.autograd.grad(losses, list(parameters.values()), w, retain_graph=True, allow_unused=True)
        seen.append(gradients)
    plain, weighted, *thrice = seen
    for node in nodes:
        if node in plain:
            at = weights_B.to(plain[node].device)
            probe = Probe(plain[node], weighted[node], at, *(found[node] for found in thrice))
            if not probe.agrees(Layout(node.axis, 1, len(losses), 1)):
                raise CoupledExamplesError(
                    f"Layer {_layer_of(node).name!r} does not have one row for each example along axis "  # type: ignore[union-attr]
                    f"{node.axis}: keep the examples in the first dimension, in their order, and independent."
                )


def _require_nothing_behind(node: Node, names: Mapping[int, str]) -> None:
    """Before a normalization over one or two numbers, gradients are rounding errors, which must not be scaled up."""
    (first, _), *_ = node.next_functions  # the input
    if first is None or not any(id(getattr(n, "variable", None)) in names for n in graph_nodes(first)):
        return
    layer = _layer_of(node)
    what = "A normalization" if layer is None else f"Layer {layer.name!r}"
    raise UnsupportedModelError(
        f"{what} normalizes groups of {_together(node):g} numbers, so the gradients of earlier layers are 0 up to "
        "rounding. Rounding depends on the other examples, and mode='normalize' would scale it up to the norm of a "
        f"gradient: use groups of more than {_TOO_FEW} numbers, or mode='clip'."
    )


def _together(node: Node) -> float:
    """The number of values in a group of a normalization; inf for other nodes."""
    if _layer_of(node) is not None:
        return float(getattr(node, "together", math.inf))
    if node.name().startswith("NativeLayerNormBackward"):
        return float(math.prod(node._saved_normalized_shape))
    if node.name().startswith("NativeGroupNormBackward"):
        return float(node._saved_C // node._saved_group * node._saved_HxW)
    return math.inf


def _layer_of(node: Node) -> ClippedLayer | None:
    role = getattr(node, "role", None)
    return None if role is None else getattr(role, "layer", None)


def _bounds(layer: ClippedLayer | None, slot: int, parameter: object) -> bool:
    """Whether a node bounds the gradient at a slot: that of its own weights. Slot 0 is the input.

    (Attention has three input slots, but its weights are matrices and cannot be inputs.)
    """
    return layer is not None and slot > 0 and any(p is parameter for p in layer.layer.parameters())
