"""Where an operation that can move rows takes them, read from the tensors that its node saved.

An *owner map* of a tensor has the example of every entry, or -1 for entries without a gradient, in a shape that
broadcasts to the tensor's. An operation of this table copies some entries of an input to some entries of its output.
The gradient goes back the same way, so a map of the input is right if it agrees with the map of the output at all these
pairs. The indices show them; no gradient is needed.

An operation that is not in the table is tested alone: `carries` calls its backward function, which is linear, with
output gradients that are scaled by a known power of two in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.gradients.fallback import call
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node, dtype_at, node_name, output_shape

Select = Callable[[Tensor], Tensor]

_LEVELS = 61  # weights are 2^-30 .. 2^30
_HALF_LEVELS = 13  # in float16


class CannotRead(Exception):  # noqa: N818 (a signal between modules, not an error)
    """The saved tensors do not show where rows go, in these layouts."""


@dataclass(frozen=True)
class Move:
    """The pairs of entries of one input and of the output: entry k of `of_input(map)` goes to k of `of_output(map)`.

    Args:
        operand: the position of the input.
        shape: of the input.
        of_input, of_output: from a map of either to the entries that take part; both have one shape, or broadcast.
        dim: rows move along this axis only; None if along several.
    """

    operand: int
    shape: torch.Size
    of_input: Select
    of_output: Select
    dim: int | None = None

    def moves_nothing(self, inner: Layout, outer: Layout) -> bool:
        """Whether no index can change the owner of a row, in these layouts of input and output."""
        return type(inner) is type(outer) is Layout and inner == outer and self.dim not in (None, inner.axis)

    def agrees(self, inner: Tensor, outer: Tensor) -> Tensor:
        """Whether every entry of the output with a gradient has the same owner in the input's map."""
        truth, claimed = self.of_output(outer), self.of_input(inner)
        return ((truth < 0) | (claimed == truth)).all()

    def owners(self, outer: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """The owner of each row of the input along an axis, and whether no row has two."""
        length = self.shape[axis]
        rows = torch.arange(length, device=outer.device).view([-1 if d == axis else 1 for d in range(len(self.shape))])
        truth, place = self.of_output(outer), self.of_input(rows)
        truth, place = truth + torch.zeros_like(place), place + torch.zeros_like(truth)
        live = truth >= 0
        truth, place = truth[live], place[live]
        owner_N = torch.full((length,), -1, device=outer.device)
        owner_N[place] = truth
        return owner_N, (owner_N[place] == truth).all()


def moves_of(node: Node) -> list[Move] | None:
    """How the operation moves rows; None if its saved tensors do not show it."""
    make = _MAKERS.get(node_name(node))
    return None if make is None else make(node)


def _input_shape(node: Node, operand: int) -> torch.Size | None:
    if operand >= len(node.next_functions):
        return None
    source, number = node.next_functions[operand]
    return None if source is None else output_shape(source, number)


def _same(owners: Tensor) -> Tensor:
    return owners


def _axis(dim: int, dimensions: int) -> int:
    """torch returns negative axes as unsigned 64 bits."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim + dimensions if dim < 0 else dim


def _along(index: Tensor, dim: int, shape: torch.Size) -> Select:
    """As `gather` selects."""
    return lambda owners: owners.expand(shape).gather(dim, index)


def _whole_rows(index: Tensor, dim: int) -> Select:
    """As `index_select` selects."""
    return lambda owners: owners.index_select(dim, index) if owners.shape[dim] > 1 else owners


def _at(indices: tuple[Tensor | None, ...], shape: torch.Size) -> Select:
    """As `tensor[indices]` selects; axes without an index keep their size in the map."""
    places = tuple(slice(None) if each is None else each for each in indices)

    def select(owners: Tensor) -> Tensor:
        sizes, axis = list(owners.shape), 0
        for each in indices:
            covered = each.dim() if each is not None and each.dtype in (torch.bool, torch.uint8) else 1
            if each is not None:
                sizes[axis : axis + covered] = shape[axis : axis + covered]
            axis += covered
        return owners.expand(sizes)[places]

    return select


def _reads_along(node: Node) -> list[Move]:
    """gather, sort, topk."""
    shape = _input_shape(node, 0)
    if not shape:
        return []
    index = node._saved_index if hasattr(node, "_saved_index") else node._saved_indices
    dim = _axis(node._saved_dim, len(shape))
    return [Move(0, shape, _along(index, dim, shape), _same, dim)]


def _reads_rows(node: Node) -> list[Move]:
    shape = _input_shape(node, 0)
    if not shape:
        return []
    dim = _axis(node._saved_dim, len(shape))
    return [Move(0, shape, _whole_rows(node._saved_index, dim), _same, dim)]


def _reads_at(node: Node) -> list[Move]:
    shape = _input_shape(node, 0)
    return [] if shape is None else [Move(0, shape, _at(node._saved_indices, shape), _same)]


def _writes_at(node: Node) -> list[Move]:
    shape = _input_shape(node, 1)
    return [] if shape is None else [Move(1, shape, _same, _at(node._saved_indices, output_shape(node, 0)))]


def _writes_rows(node: Node) -> list[Move]:
    """index_add, index_copy."""
    shape = _input_shape(node, 1)
    if not shape:
        return []
    dim = _axis(node._saved_dim, len(shape))
    return [Move(1, shape, _same, _whole_rows(node._saved_index, dim), dim)]


def _writes_along(node: Node) -> list[Move]:
    """scatter, scatter_add."""
    shape = _input_shape(node, 1)
    if not shape:
        return []
    dim = _axis(node._saved_dim, len(shape))
    return [Move(1, shape, _same, _along(node._saved_index, dim, output_shape(node, 0)), dim)]


def _reads_by_mask(node: Node) -> list[Move]:
    shape = _input_shape(node, 0)
    mask = node._saved_mask
    if shape is None:
        return []
    full = torch.empty(shape, device="meta").add(torch.empty(mask.shape, device="meta")).shape
    return [Move(0, shape, lambda owners: owners.expand(full)[mask.expand(full)], _same)]


def _writes_by_mask(node: Node) -> list[Move]:
    """masked_scatter: the entries of the source in their order. A mask of whole rows takes whole rows."""
    shape, mask, full = _input_shape(node, 1), node._saved_mask, output_shape(node, 0)
    if shape is None:
        return []
    mask = mask.expand(full)
    takes_rows = bool(full) and bool(shape) and full[-1] == shape[-1] and mask.stride(-1) == 0
    if takes_rows:
        mask = mask[..., :1]

    def entries(owners: Tensor, sizes: torch.Size) -> Tensor:
        if not takes_rows:
            return owners.expand(sizes)
        if owners.shape[-1] != 1:
            raise CannotRead("the examples lie along the rows")
        return owners.expand(*sizes[:-1], 1)

    def of_output(owners: Tensor) -> Tensor:
        return entries(owners, full)[mask]

    def of_input(owners: Tensor) -> Tensor:
        return entries(owners, shape).flatten()[: int(mask.sum())]

    return [Move(1, shape, of_input, of_output)]


_MAKERS: dict[str, Callable[[Node], list[Move]]] = {
    **dict.fromkeys(("GatherBackward0", "SortBackward0", "SortBackward1", "TopkBackward0"), _reads_along),
    "IndexSelectBackward0": _reads_rows,
    "IndexBackward0": _reads_at,
    "MaskedSelectBackward0": _reads_by_mask,
    **dict.fromkeys(("IndexPutBackward0", "IndexPutImplBackward0"), _writes_at),
    **dict.fromkeys(("IndexAddBackward0", "IndexCopyBackward0"), _writes_rows),
    **dict.fromkeys(("ScatterBackward0", "ScatterBackward1", "ScatterAddBackward0"), _writes_along),
    "MaskedScatterBackward0": _writes_by_mask,
}


def owner_map(layout: Layout, dimensions: int, device: torch.device) -> Tensor:
    """The owner map of a tensor with so many dimensions."""
    return layout.broadcast(layout.owners(device), dimensions)


def carries(node: Node, outer: Mapping[int, Layout], inner: Mapping[int, Layout]) -> Tensor:
    """Whether an operation carries every example's gradient from its outputs to the same example's rows of its inputs.

    Its backward function is called with one row u for all examples, and with u times two to the power of a digit of
    each example's number. A row of the input that depends on one example is scaled by exactly that.

    Args:
        node: the operation.
        outer: the layouts of its outputs.
        inner: the layouts of the inputs to be tested, by operand.
    """
    batch, first = next(iter(outer.values())).batch, next(iter(outer))
    dtype, device = dtype_at(node, first), node._input_metadata[first].device
    plain = _called(node, outer, inner, torch.ones(batch, dtype=dtype, device=device))
    flags = []
    for weights_B in _weights(batch, dtype, device):
        weighted = _called(node, outer, inner, weights_B)
        for operand, layout in inner.items():
            p, w = plain[operand], weighted[operand]
            weight = layout.broadcast(layout.along_axis(weights_B.to(p.dtype)), p.dim())
            flags.append((w == p * weight).all())
    return torch.stack(flags).all()


def _weights(batch: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Powers of two that spell every example's number."""
    levels = _HALF_LEVELS if dtype is torch.float16 else _LEVELS
    number_B, weights, unit = torch.arange(batch, device=device), [], 1
    while unit < batch:
        weights.append((2.0 ** (number_B // unit % levels - levels // 2)).to(dtype))
        unit *= levels
    return weights


def _called(
    node: Node, outer: Mapping[int, Layout], inner: Mapping[int, Layout], weights_B: Tensor
) -> dict[int, Tensor]:
    gradients = {}
    for k, layout in outer.items():
        shape, dtype = output_shape(node, k), dtype_at(node, k)
        row = _varied(shape, layout.axis, weights_B.device).to(dtype)
        gradients[k] = (row * layout.broadcast(layout.along_axis(weights_B.to(dtype)), len(shape))).expand(shape)
    found = call(node, gradients)
    return {operand: _in_full(found[operand], node, operand) for operand in inner}


def _varied(shape: torch.Size, axis: int, device: torch.device) -> Tensor:
    """Numbers between 1 and 2 along the longest other axis: the gradients of equal rows could cancel."""
    others = [d for d in range(len(shape)) if d != axis]
    if not others:
        return torch.ones((), device=device)
    longest = max(others, key=lambda d: shape[d])
    numbers = 1 + (torch.arange(shape[longest], device=device) * 0.618034).frac()
    return numbers.view([-1 if d == longest else 1 for d in range(len(shape))])


def _in_full(gradient: Tensor | None, node: Node, operand: int) -> Tensor:
    source, number = node.next_functions[operand]
    if gradient is None:
        return torch.zeros((), dtype=dtype_at(source, number)).expand(output_shape(source, number))
    return gradient.sum_to_size(output_shape(source, number))
