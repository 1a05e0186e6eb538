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


class RowSource(NamedTuple):
    """Rows along `axis` have the owners of the rows along `inner` of an operation's operand, or of multiples of them.

    A tensor may have k rows for each row of the operand, or one for k: `fold` is "inner" if these k are neighbours,
    "outer" if the whole tensor is repeated k times, and "same" if k is 1.
    """

    mover: int
    operand: int
    inner: int
    axis: int
    fold: str

    def owners(self, owner_N: Tensor, length: int) -> Tensor | None:
        """The owners of so many rows, if the operand's are known; None if they do not fit."""
        n = len(owner_N)
        if length == n or self.fold == "same" or n == 0 or length == 0:
            return owner_N if length == n else None
        is_inner = self.fold == "inner"
        if length % n == 0:
            return owner_N.repeat_interleave(length // n) if is_inner else owner_N.repeat(length // n)
        if n % length:
            return None
        parts = owner_N.view(length, -1) if is_inner else owner_N.view(-1, length).T
        most = parts.amax(1)
        return most if bool(((parts == most[:, None]) | (parts < 0)).all()) else None


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


def sources_of(
    graph: Graph, measured: Mapping[Place, list[Layout]]
) -> tuple[dict[Place, frozenset[RowSource]], set[int]]:
    """For each place, the sources that give the owners that were measured there; and all nodes behind irregular rows.

    Behind rows in a data-dependent order, a layout that looks regular is so by chance.
    """
    found: dict[Place, set[RowSource]] = {place: set() for place in measured}
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
                    possible = (
                        (each, RowSource(index, move.operand, inner, each.axis, fold))
                        for each in layouts
                        for fold in ("inner", "outer", "same")
                    )
                    found[place].update(source for each, source in possible if _explains(source, owner_N, each))
    return {place: frozenset(sources) for place, sources in found.items()}, moved


def _owners(graph: Graph, index: int, move: Move, outer: Layout, axis: int) -> Tensor | None:
    """The owners of an operand's rows along an axis, from the layout of the output."""
    shape, node = output_shape(graph.order[index], 0), graph.order[index]
    try:
        owner_N, fits = move.owners(owner_map(outer, len(shape), node._input_metadata[0].device), axis)
    except CannotRead:
        return None
    return owner_N if bool(fits) else None


def _explains(source: RowSource, owner_N: Tensor, layout: Layout) -> bool:
    """Whether a source gives the owners of a layout. Rows without a gradient agree with any."""
    owners, expected = layout.owners(owner_N.device), source.owners(owner_N, layout.size)
    if expected is None:
        return False
    live = (owners >= 0) & (expected >= 0)
    return bool(live.any()) and bool((owners[live] == expected[live]).all())


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
        sources: Mapping[Place, frozenset[RowSource]],
    ) -> None:
        self._graph, self._doubts, self._sources = graph, doubts, sources
        self._found: dict[int, dict[int, Layout]] = {index: dict(each) for index, each in regular.items()}
        self._ragged: dict[object, Ragged] = {}
        self._operands: dict[tuple[int, int, int], Tensor] = {}
        self._flags: list[tuple[int, Tensor]] = []
        self.unread: int | None = None  # the operation that does not show the layouts, if there are none
        # Places of which every batch so far allowed several layouts: no gradient may arrive there.
        self.silent: set[Place] = set()

    def layouts(self) -> dict[int, dict[int, Layout]] | None:
        """The layouts at all outputs of all uses; None if they do not hold in this batch or cannot be read."""
        graph = self._graph
        try:
            for use in graph.uses:
                for k in use.outputs:
                    self.unread = use.index
                    self._at((use.index, k))
            for index in _movers(graph):
                self.unread = index
                self._check(index)
        except CannotRead:
            return None
        if not self._flags or bool(torch.stack([flag for _, flag in self._flags]).all()):
            return self._found
        self.unread = next(index for index, flag in self._flags if not bool(flag))
        return None

    def _at(self, place: Place) -> Layout:
        index, k = place
        known = self._found.setdefault(index, {})
        if k not in known:
            sources = self._sources.get(place)
            if not sources or is_tracing():
                raise CannotRead("no source gives the owners")
            shape = output_shape(self._graph.order[index], k)
            source = self._fitting(sources, shape)
            known[k] = self._by(source, shape[source.axis])
        return known[k]

    def _fitting(self, sources: frozenset[RowSource], shape: torch.Size) -> RowSource:
        """The first source, if its rows can be folded in one way only."""
        first = min(sources)
        same = sorted(source for source in sources if source[:4] == first[:4])
        folds = [source for source in same if source.fold != "same"] or same
        length = len(self._owners_at(first))
        if first.axis >= len(shape) or (shape[first.axis] != length and len(folds) > 1):
            raise CannotRead("the rows may be folded in two ways")
        return folds[0]

    def _owners_at(self, source: RowSource) -> Tensor:
        """The owners of the rows of the operand."""
        index, operand, inner, *_ = source
        key = index, operand, inner
        if key not in self._operands:
            move = next(move for move in moves_of(self._graph.order[index]) or () if move.operand == operand)
            owner_N = _owners(self._graph, index, move, self._at((index, 0)), inner)
            if owner_N is None or self._is_silent((index, 0)):
                raise CannotRead("a row has two owners")
            self._operands[key] = owner_N
        return self._operands[key]

    def _by(self, source: RowSource, length: int) -> Ragged:
        """The layout of so many rows with this source."""
        key = source[:3], source.fold, length
        if key not in self._ragged:
            owner_N = source.owners(self._owners_at(source), length)
            if owner_N is None:
                raise CannotRead("the rows are not those of the source")
            self._ragged[key] = Ragged.of(source.axis, owner_N, len(self._graph.losses))
        found = self._ragged[key].on_axis(source.axis)
        assert isinstance(found, Ragged)
        return found

    def _check(self, index: int) -> None:
        """Compare the layouts around an operation with its indices."""
        graph, node = self._graph, self._graph.order[index]
        operands, moves = _operands(graph, index), moves_of(node)
        if not operands:
            return
        if moves is None:
            places = [(index, k) for k in graph.outline.outputs[index]]
            inner = {j: self._at(place) for j, place in operands.items() if not self._is_silent(place)}
            if is_tracing():
                raise CannotRead("a trace has no data")
            if all([self._is_silent(place) for place in places]) or not inner:
                return
            outer = {k: self._at((index, k)) for index, k in places}
            self._flags.append((index, carries(node, outer, inner)))
            return
        for move in moves:
            if move.operand not in operands:
                continue
            if self._is_silent((index, 0)) or self._is_silent(operands[move.operand]):
                continue
            one, other = self._at(operands[move.operand]), self._at((index, 0))
            if move.moves_nothing(one, other):
                continue
            if is_tracing():
                raise CannotRead("a trace has no data")
            device = node._input_metadata[0].device
            inside = owner_map(one, len(move.shape), device)
            outside = owner_map(other, len(output_shape(node, 0)), device)
            self._flags.append((index, move.agrees(inside, outside)))

    def _is_silent(self, place: Place) -> bool:
        """Whether a place has several possible layouts. The backward pass has to check that it gets no gradient."""
        if not self._doubts.get(place[0], {}).get(place[1]):
            return False
        if is_tracing():
            raise CannotRead("a trace has no data")
        self.silent.add(place)
        return True
