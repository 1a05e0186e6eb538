"""What backpropagation clipping rests on, read from the graph of the losses: every way from a loss to a trainable
parameter ends in a clipped layer, each is used as often as was said, and its rows are the examples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError, StepError, UnsupportedModelError
from clipwise.gradients.layout import Layout, Probe, probe_weights
from clipwise.gradients.opaque import require_not_rerun
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.layers.clipped import ClippedLayer, unclipped

Node = Any
_TOO_FEW = 2  # numbers that are normalized together
Wiring = int  # tells graphs of different operations apart, or of the same ones in another order


def clipped_nodes(
    losses: Tensor, parameters: Mapping[str, Tensor], layers: Iterable[ClippedLayer]
) -> tuple[list[Node], Wiring]:
    """The nodes of clipped layers behind the losses, or an error that says what bypasses them; and the wiring.

    A parameter's own layer is the one among `layers`: another one around it has constants and uses of its own.
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
                    "run, and whose constants its sensitivity does not know. Clip a model once, and make it private "
                    "as a whole."
                )
            elif not _bounds(layer, slot, variable):
                by = type(node).__name__ if layer is None else f"layer {layer.name!r}, as its input"
                raise UnsupportedModelError(
                    f"Parameter {name!r} is used outside of its clipped layer, by {by}, where nothing "
                    "bounds what one example does to it. Use it through its layer alone. A penalty on weights is no "
                    "matter of the data: give it as make_private(..., penalty=f), or take the optimizer's "
                    "weight_decay. A model under torch.compile trains without its clips: leave it as it is, and take "
                    "private.compiled(loss)."
                )
            if child not in entered:
                entered.add(child)
                stack.append(child)
    for node in few:
        _require_nothing_behind(node, names)
    _require_present(found)
    _require_uses(found)
    _require_examples(found, len(losses))
    return found, hash(tuple(kinds))


def require_rows_of_examples(losses: Tensor, nodes: list[Node], parameters: Mapping[str, Tensor]) -> None:
    """Row i of every clipped layer must belong to example i: shown by a probe (gradients/layout.py)."""
    weights_B = probe_weights(len(losses), losses)
    seen: list[dict[Node, Tensor]] = []
    ones_B = torch.ones_like(losses)
    # Where kernels add in an order that changes, a third pass shows how far rounding goes (gradients/layout.py).
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
                    f"{node.axis}, so its clips bound something else. Keep the examples in the first dimension, in "
                    "their order, and apart from each other."
                )


def _require_nothing_behind(node: Node, names: Mapping[int, str]) -> None:
    """Behind a normalization of one or two numbers gradients are 0 but for rounding, which would be made long."""
    (first, _), *_ = node.next_functions  # the input
    entered, stack = {first}, [first]
    while stack:
        behind = stack.pop()
        if behind is None:
            continue
        if id(getattr(behind, "variable", None)) in names:
            layer = _layer_of(node)
            what = "A normalization" if layer is None else f"Layer {layer.name!r}"
            raise UnsupportedModelError(
                f"{what} has groups of so few numbers ({_together(node):g}) that gradients behind it are 0 but for "
                "rounding. Rounding depends on the other examples, and mode='normalize' would make it as long as a "
                f"gradient: take groups of more than {_TOO_FEW} numbers, or mode='clip'."
            )
        new = {child for child, _ in behind.next_functions} - entered
        entered |= new
        stack.extend(new)


def _together(node: Node) -> float:
    """How many numbers a normalization gives a mean and a variance; inf for other nodes."""
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
    """Whether a node bounds the gradient of what it takes in a slot: its own weights. The first slot is the input.

    (Attention has three of them, but takes no matrix for one, as all of its weights are.)
    """
    return layer is not None and slot > 0 and any(p is parameter for p in layer.layer.parameters())


def _require_present(nodes: list[Node]) -> None:
    for node in nodes:
        if not node.role.is_present:
            raise StepError(
                f"Layer {node.role.layer.name!r} was given other constants after these losses were computed, and the "
                "noise is for those it has now. Compute the losses of the batch that was drawn last."
            )


def _require_uses(nodes: list[Node]) -> None:
    for (layer, _), count in Counter((node.role.layer, node.role.name) for node in nodes).items():
        if count > layer.uses:
            raise UnsupportedModelError(
                f"Layer {layer.name!r} is used more often in one forward pass than the {layer.uses} times that its "
                f"sensitivity counts. Give clip_inputs(..., uses={{{layer.name!r}: n}}) with the most uses n that may "
                "happen, a public constant, or use a layer of its own for each."
            )


def _require_examples(nodes: list[Node], size: int) -> None:
    for node in nodes:
        if node.examples != size:
            raise StepError(
                f"Layer {node.role.layer.name!r} was given another number of rows than there are losses, and it clips "
                "rows. Keep the examples along the first dimension of everything that goes into a layer (positions "
                "behind it, not folded into it), and do not use averaged_views."
            )
