"""Any other operation, exactly: its own backward function, called once for each example.

A node's backward function is linear in the output gradient. With all rows but those of example i set to
0, it returns the gradient of example i with respect to each input, whatever the operation computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.forms import Form, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node, dtype_at, node_name, zeros_at


def call(node: Node, outputs: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Run one node's backward function, with zeros for outputs that have no gradient."""
    numbers = range(len(node._input_metadata))
    grads = [outputs[number] if number in outputs else zeros_at(node, number) for number in numbers]
    with torch.no_grad():
        # A custom autograd.Function's node is not callable itself.
        result = node(*grads) if callable(node) else node.apply(*grads)
    return result if isinstance(result, tuple) else (result,)


def _results(node: Node) -> dict[int, int]:
    """Where the gradient of each input of a node lies among those that the node returns: operand -> place.

    A built-in operation returns one for each of its `next_functions`. An `autograd.Function` returns one for each
    argument of `forward`, of which `next_functions` has the tensors alone; those that need a gradient are the same
    ones in both, in the same order.
    """
    operands = [j for j, (source, _) in enumerate(node.next_functions) if source is not None]
    if callable(node):
        return {j: j for j in operands}
    arguments = [place for place, needed in enumerate(node.needs_input_grad) if needed]
    if len(arguments) != len(operands):
        raise UnsupportedModelError(
            f"{node_name(node)} does not say which of its arguments need a gradient, so its per-example gradients "
            "cannot be matched with its inputs. method='loop' is exact."
        )
    return dict(zip(operands, arguments, strict=True))


def forms(
    node: Node,
    shapes: Mapping[int, torch.Size],
    outputs: Mapping[int, Tensor],
    layouts: Mapping[int, Layout],
) -> dict[int, Form]:
    """One form for each wanted operand, at the price of B calls of the node."""
    batch = next(iter(layouts.values())).batch
    results = _results(node)
    rows: dict[int, list[Tensor]] = {operand: [] for operand in shapes}
    with _only_finite(node):
        for i in range(batch):
            grads = call(node, {k: layouts[k].only(g, i) for k, g in outputs.items()})
            for operand, shape in shapes.items():
                rows[operand].append(_as_input(grads[results[operand]], shape, *node.next_functions[operand]))
    written = {operand: torch.stack(grads) for operand, grads in rows.items()}
    healthy_B = _finite([layouts[k].split(g) for k, g in outputs.items()])
    if bool(healthy_B.any()) and not bool(healthy_B.all()) and not bool(_finite(written.values()).any()):
        raise UnsupportedModelError(
            f"{node_name(node)} keeps its inputs in a form of its own, so an example that is not finite cannot be "
            "kept apart from the others there. Leave such examples out of the data, or make them finite."
        )
    return {operand: Written.of(grads) for operand, grads in written.items()}


def _as_input(grad: Tensor | None, shape: torch.Size, source: Node, number: int) -> Tensor:
    """A gradient in the shape and type of the input, to which a node may leave it to the engine to bring it."""
    if grad is None:
        return zeros_at(source, number)
    grad, dtype = grad.detach().sum_to_size(shape), dtype_at(source, number)
    return (grad.real if grad.is_complex() and not dtype.is_complex else grad).to(dtype)


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all that an example has in these tensors [B, ...] is finite."""
    return torch.stack([torch.isfinite(t.flatten(1)).all(1) for t in tensors]).all(0)


@contextmanager
def _only_finite(node: Node) -> Iterator[None]:
    """Keep what an example that is not finite has saved away from the others, during the calls.

    A summed weight gradient multiplies every row that the node saved, those of the other examples by 0,
    and 0 * Inf is NaN. Such entries are 0 until the end. (Which example they belong to is not guessed. As
    a rule its output gradient is not finite either, and tells; if it is, the example counts without them.)
    """
    cleared: list[tuple[Tensor, Tensor]] = []
    for saved in _saved(node):
        silent = ~torch.isfinite(saved)
        if bool(silent.any()):
            cleared.append((saved, saved.clone()))
            saved.masked_fill_(silent, 0)
    try:
        yield
    finally:
        for saved, before in cleared:
            saved.copy_(before)


def _saved(node: Node) -> Iterator[Tensor]:
    """The real and complex tensors that a node keeps; their `.data`, so that no version changes."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            value = getattr(node, name)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(saved, Tensor) and (saved.is_floating_point() or saved.is_complex()):
                    yield saved.data
