"""Layouts of graphs in which data can reorder rows (moves.py), for a batch that is not probed.

The first batches are probed at the uses and around every operation that can move rows. Between these operations the
order of rows follows from the graph alone, as in any other graph. So if the layouts hold around each of them in a new
batch, they hold everywhere, and the indices show whether they do.

Rows in a data-dependent order (the tokens of an expert) have no layout that lasts. But every such tensor lies behind an
operation that takes its rows to places of a tensor with a known layout: its *source*. Probes of several batches show
that the rows have the owners that the indices of the source give, and the indices of a new batch give the new owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.moves import CannotRead, Move, carries, moves_of, owner_map
from clipwise.gradients.walk import Graph, Place, output_shape
from clipwise.kernels.tracing import is_tracing


class Source(NamedTuple):
    """Rows along `axis` have the owners of the rows along `inner` of an operation's operand."""

    mover: int
    operand: int
    inner: int
    axis: int


def mover_places(graph: Graph) -> list[Place]:
    """The outputs and the moved inputs of all operations that can move rows of examples."""
    return list(dict.fromkeys(place for index in _movers(graph) for place in _around(graph, index)))


def _movers(graph: Graph) -> list[int]:
    return [index for index in graph.outline.movers if index not in graph.plan.derived]


def _around(graph: Graph, index: int) -> list[Place]:
    moved = moves_of(graph.order[index])
    operands = _operands(graph, index)
    if moved is not None:
        operands = {j: place for j, place in operands.items() if j in {move.operand for move in moved}}
    return [*((index, k) for k in graph.outline.outputs[index]), *operands.values()] if operands else []


def _operands(graph: Graph, index: int) -> dict[int, Place]:
    """The inputs of an operation that carry examples."""
    inputs = graph.outline.entries[index].inputs or ()
    return {j: place for j, place in enumerate(inputs) if place[0] >= 0 and place[0] not in graph.plan.derived}


def sources_of(graph: Graph, measured: Mapping[Place, list[Layout]]) -> tuple[dict[Place, frozenset[Source]], set[int]]:
    """For each place, the sources that give the owners that were measured there; and all nodes behind irregular rows.

    Behind rows in a data-dependent order, a layout that looks regular is so by chance.
    """
    found: dict[Place, set[Source]] = {place: set() for place in measured}
    moved: set[int] = set()
    for index in _movers(graph):
        outer = measured.get((index, 0))
        for move in moves_of(graph.order[index]) or ():
            start = _operands(graph, index).get(move.operand)
            if start is None or not outer or not measured.get(start):
                continue
            inner = measured[start][0].axis
            owner_N = _owners(graph, index, move, outer[0], inner)
            if owner_N is None:
                continue
            region = _region(graph, start[0])
            moved |= region if type(measured[start][0]) is Ragged else set()
            for place, layouts in measured.items():
                if place[0] in region:
                    axes = {each.axis for each in layouts if _are_equal(each.owners(owner_N.device), owner_N)}
                    found[place].update(Source(index, move.operand, inner, axis) for axis in axes)
    return {place: frozenset(sources) for place, sources in found.items()}, moved


def _owners(graph: Graph, index: int, move: Move, outer: Layout, axis: int) -> Tensor | None:
    """The owners of an operand's rows along an axis, from the layout of the output."""
    shape, node = output_shape(graph.order[index], 0), graph.order[index]
    try:
        owner_N, fits = move.owners(owner_map(outer, len(shape), node._input_metadata[0].device), axis)
    except CannotRead:
        return None
    return owner_N if bool(fits) else None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Rows without a gradient agree with any."""
    if len(one) != len(other):
        return False
    live = (one >= 0) & (other >= 0)
    return bool(live.any()) and bool((one[live] == other[live]).all())


def _region(graph: Graph, start: int) -> set[int]:
    """The places that lead to this one without an operation in between that moves their rows."""
    entries, movers = graph.outline.entries, set(_movers(graph))
    found, stack = {start}, [start]
    while stack:
        index = stack.pop()
        moved = moves_of(graph.order[index]) if index in movers else []
        if moved is None:
            continue
        cut = {move.operand for move in moved}
        for j, (place, _) in enumerate(entries[index].inputs or ()):
            if place >= 0 and j not in cut and place not in found:
                found.add(place)
                stack.append(place)
    return found


class Reading:
    """The layouts of one batch.

    Args:
        graph: of the batch.
        regular: layouts that are expected at places where the order of rows does not depend on data.
        doubts: other possible layouts at such places.
        sources: of the other places.
    """

    def __init__(
        self,
        graph: Graph,
        regular: Mapping[int, Mapping[int, Layout]],
        doubts: Mapping[int, Mapping[int, list[Layout]]],
        sources: Mapping[Place, frozenset[Source]],
    ) -> None:
        self._graph, self._doubts, self._sources = graph, doubts, sources
        self._found: dict[int, dict[int, Layout]] = {index: dict(each) for index, each in regular.items()}
        self._ragged: dict[tuple[int, int, int, int], Ragged] = {}
        self._flags: list[Tensor] = []

    def layouts(self) -> dict[int, dict[int, Layout]] | None:
        """The layouts at all outputs of all uses; None if they do not hold in this batch or cannot be read."""
        graph = self._graph
        try:
            for use in graph.uses:
                for k in use.outputs:
                    self._at((use.index, k))
            for index in _movers(graph):
                self._check(index)
        except CannotRead:
            return None
        return self._found if not self._flags or bool(torch.stack(self._flags).all()) else None

    def _at(self, place: Place) -> Layout:
        index, k = place
        known = self._found.setdefault(index, {})
        if k not in known:
            sources = self._sources.get(place)
            if not sources or is_tracing():
                raise CannotRead("no source gives the owners")
            known[k] = self._by(min(sources))
            if output_shape(self._graph.order[index], k)[known[k].axis] != known[k].size:
                raise CannotRead("the rows are not those of the source")
        return known[k]

    def _by(self, source: Source) -> Ragged:
        if source in self._ragged:
            return self._ragged[source]
        graph, (index, operand, inner, axis) = self._graph, source
        other = next((r for s, r in self._ragged.items() if s[:3] == source[:3]), None)
        if other is None:
            move = next(move for move in moves_of(graph.order[index]) or () if move.operand == operand)
            owner_N = _owners(graph, index, move, self._at((index, 0)), inner)
            if owner_N is None:
                raise CannotRead("a row has two owners")
            other = Ragged.of(axis, owner_N, len(graph.losses))
        found = other.on_axis(axis)
        assert isinstance(found, Ragged)
        self._ragged[source] = found
        return found

    def _check(self, index: int) -> None:
        """Compare the layouts around an operation with its indices."""
        graph, node = self._graph, self._graph.order[index]
        operands, moves = _operands(graph, index), moves_of(node)
        if not operands:
            return
        if moves is None:
            outer = {k: self._sure((index, k)) for k in graph.outline.outputs[index]}
            inner = {j: self._sure(place) for j, place in operands.items()}
            if is_tracing():
                raise CannotRead("a trace has no data")
            self._flags.append(carries(node, outer, inner))
            return
        for move in moves:
            if move.operand not in operands:
                continue
            one, other = self._sure(operands[move.operand]), self._sure((index, 0))
            if move.moves_nothing(one, other):
                continue
            if is_tracing():
                raise CannotRead("a trace has no data")
            device = node._input_metadata[0].device
            inside = owner_map(one, len(move.shape), device)
            self._flags.append(move.agrees(inside, owner_map(other, len(output_shape(node, 0)), device)))

    def _sure(self, place: Place) -> Layout:
        """The layout of a place, if there is only one."""
        if self._doubts.get(place[0], {}).get(place[1]):
            raise CannotRead("several layouts are possible")
        return self._at(place)
