"""Per-example gradients of an operation without a rule: its backward function is called once for each example.

A node's backward function is linear in the output gradient. With the rows of all examples except i set to 0, it returns
the gradient of example i with respect to each input, for any operation.
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
    """Call one node's backward function, with zeros for outputs that have no gradient."""
    numbers = range(len(node._input_metadata))
    grads = [outputs[number] if number in outputs else zeros_at(node, number) for number in numbers]
    with torch.no_grad():
        # The node of a custom autograd.Function is not callable.
        result = node(*grads) if callable(node) else node.apply(*grads)
    return result if isinstance(result, tuple) else (result,)


def _results(node: Node) -> dict[int, int]:
    """The index of each operand's gradient among the results of a node: operand -> index.

    A built-in operation returns one result per entry of `next_functions`. An `autograd.Function` returns one per
    argument of `forward`, and `next_functions` has its tensor arguments only. The arguments that need a gradient are
    the same in both, in the same order.
    """
    operands = [j for j, (source, _) in enumerate(node.next_functions) if source is not None]
    if callable(node):
        return {j: j for j in operands}
    arguments = [place for place, needed in enumerate(node.needs_input_grad) if needed]
    if len(arguments) != len(operands):
        raise UnsupportedModelError(
            f"{node_name(node)} does not record which of its arguments need a gradient, so its per-example gradients "
            "cannot be matched with its inputs. Use method='loop', which is exact."
        )
    return dict(zip(operands, arguments, strict=True))


def forms(
    node: Node, shapes: Mapping[int, torch.Size], outputs: Mapping[int, Tensor], layouts: Mapping[int, Layout]
) -> dict[int, Form]:
    """One form for each requested operand, from B calls of the node."""
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
            f"{node_name(node)} does not expose its saved tensors, so an example that is not finite cannot be "
            "separated from the others there. Remove such examples from the data, or make them finite."
        )
    return {operand: Written.of(grads) for operand, grads in written.items()}


def _as_input(grad: Tensor | None, shape: torch.Size, source: Node, number: int) -> Tensor:
    """The gradient in the shape and dtype of the input. (Autograd's engine usually does this reduction.)"""
    if grad is None:
        return zeros_at(source, number)
    grad, dtype = grad.detach().sum_to_size(shape), dtype_at(source, number)
    return (grad.real if grad.is_complex() and not dtype.is_complex else grad).to(dtype)


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all entries of an example in these tensors [B, ...] are finite."""
    return torch.stack([torch.isfinite(t.flatten(1)).all(1) for t in tensors]).all(0)


@contextmanager
def _only_finite(node: Node) -> Iterator[None]:
    """During the calls, replace non-finite entries of the saved tensors by 0.

    A weight gradient multiplies every saved row, those of other examples by 0, and 0 * Inf is NaN. The owner of a
    non-finite entry is not needed: its output gradient is usually not finite either, and marks the example. If the
    output gradient is finite, the example counts without these entries.
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
    """The floating-point and complex tensors that a node saved, as `.data`, so that no version counter changes."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            value = getattr(node, name)
            for saved in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(saved, Tensor) and (saved.is_floating_point() or saved.is_complex()):
                    yield saved.data
