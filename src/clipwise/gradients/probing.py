"""The probes of one graph: extra backward passes with weighted losses, computed on demand.

layout.py describes what a probe shows about one tensor, and how several probes identify the owner of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.layout import (
    LARGEST_WEIGHT,
    Layout,
    Numbers,
    Probe,
    Ragged,
    hypotheses,
    probe_weights,
    surviving,
)
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Edge, Graph, gradients_at

_EXTRA_PROBES = 4
_TOGETHER = 16  # edges per pass


class Prober:
    """The probes of one graph, computed on demand."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._plain: dict[Edge, Tensor] = {}
        self._last: tuple[object, list[Probe]] | None = None
        self._thrice: dict[Edge, Tensor] = {}  # where no layout agreed: a measure of rounding (layout.py)
        self._weigh(1.0)

    def _weigh(self, unit: float) -> None:
        """Start with new weights, powers of two times `unit`."""
        losses, self._unit = self._graph.losses, unit
        self._numbers = Numbers(len(losses), losses, unit)
        self._random = probe_weights(len(losses), losses) * unit
        # If data can reorder rows, weights must be distinct: a swap of two examples would go unnoticed.
        self._weights = list(self._numbers.weights) if self._graph.outline.moves_rows else [self._random]
        self._weighted: dict[Edge, list[Tensor]] = {e: [] for e in self._plain}

    def at(self, edges: list[Edge]) -> None:
        """Compute the probes at these edges."""
        new = [e for e in edges if e not in self._plain]
        if new:
            self._plain.update(self._backward(new, torch.ones_like(self._graph.losses)))
            self._weighted.update({e: [] for e in new})
            if self._unit == 1 and any(_is_huge(self._plain[e]) for e in new):
                # Otherwise the rows of one huge example would overflow and be ignored.
                self._weigh(1 / LARGEST_WEIGHT)
        self._complete()

    def plain(self, edge: Edge) -> Tensor:
        """The gradient of the plain sum of losses."""
        return self._plain[edge]

    def is_dead(self, edge: Edge) -> bool:
        """Whether no gradient arrives here, so that this batch decides nothing."""
        return all(probe.is_dead() for probe in self._probes(edge))

    def is_silent(self, edge: Edge) -> bool:
        """Whether every entry that arrives is 0 or not finite."""
        return all(probe.is_silent() for probe in self._probes(edge))

    def spares_some(self, edge: Edge, layout: Layout) -> bool:
        """Whether, in this layout, all rows of some example are finite."""
        return bool(torch.isfinite(layout.split(self._plain[edge])).flatten(1).all(1).any())

    def any_loss_is_finite(self) -> bool:
        """Whether some example has a finite loss."""
        return bool(torch.isfinite(self._graph.losses).any())

    def is_finite(self) -> bool:
        """Whether all gradients in the probes are finite."""
        return all(bool(torch.isfinite(g).all()) for g in self._plain.values())

    def layouts(self, edge: Edge) -> list[Layout]:
        """The regular layouts that agree with all probes."""
        probes = self._probes(edge)
        found = surviving(probes)
        if not found and edge not in self._thrice and not probes[0].repeats:
            edges = list(self._plain)
            place = edges.index(edge)
            # The next edges will need it too. All edges at once would take as much memory as the graph.
            some = edges[place : place + _TOGETHER]
            self._thrice = self._backward(some, torch.full_like(self._graph.losses, 3.0))
            found = surviving(self._probes(edge))
        return found

    def ragged(self, edge: Edge) -> Ragged | None:
        """The layout with rows in a data-dependent order or number, if every row has one owner."""
        return self._numbers.read(self._spelled_out(edge))

    def is_shared_buffer(self, edge: Edge) -> bool:
        """Whether each row has one owner if two axes are merged: a buffer with slots for rows of any example.

        For example [experts, capacity, ...] in a mixture of experts, where a slot holds another example in each expert.
        """
        probes = self._spelled_out(edge)
        for axis in range(self._plain[edge].dim() - 1):
            flat = [
                Probe(p.plain.flatten(axis, axis + 1), p.weighted.flatten(axis, axis + 1), p.weights_B) for p in probes
            ]
            if self._numbers.read(flat) is not None:
                return True
        return False

    def _spelled_out(self, edge: Edge) -> list[Probe]:
        """The probes of an edge, including those that identify owners."""
        for weights_B in (*self._numbers.weights, self._random):
            if not any(weights_B is w for w in self._weights):
                self._weights.append(weights_B)
        self._complete()
        return self._probes(edge)

    def settle(self, edge: Edge) -> tuple[list[Layout], bool]:
        """The possible layouts at an edge, and whether they can be reused for another batch.

        Layouts that several probes cannot distinguish give the same result on this batch.
        """
        plain, batch = self._plain[edge], len(self._graph.losses)
        if self.is_dead(edge):
            regular = list(hypotheses(plain.shape, batch))
            if regular:
                return regular, True
        if self.is_silent(edge):
            ownerless = Ragged.without_owners(plain.shape, batch, plain.device)
            return [ownerless] if ownerless else [], False
        left = self.layouts(edge)
        if not left:
            ragged = self.ragged(edge)
            return [ragged] if ragged else [], False
        for _ in range(_EXTRA_PROBES):
            if len(left) == 1:
                break
            weights_B = probe_weights(batch, self._graph.losses) * self._unit
            more = Probe(plain, self._backward([edge], weights_B)[edge], weights_B, self._thrice.get(edge))
            left = [layout for layout in left if more.agrees(layout)]
        return left, True

    def _probes(self, edge: Edge) -> list[Probe]:
        """The probes of an edge, cached for the last edge: consecutive queries are usually about the same one."""
        made = (edge, len(self._weighted[edge]), edge in self._thrice, self._unit)
        if self._last is None or self._last[0] != made:
            self._last = made, self._new_probes(edge)
        return self._last[1]

    def _new_probes(self, edge: Edge) -> list[Probe]:
        pairs = zip(self._weighted[edge], self._weights, strict=True)
        thrice = self._thrice.get(edge)
        return [Probe(self._plain[edge], weighted, weights_B, thrice) for weighted, weights_B in pairs]

    def _complete(self) -> None:
        """One backward pass for each weighting that some edges lack."""
        for k, weights_B in enumerate(self._weights):
            lacking = [e for e, made in self._weighted.items() if len(made) == k]
            for edge, g in self._backward(lacking, weights_B).items():
                self._weighted[edge].append(g)

    def _backward(self, edges: list[Edge], weights_B: Tensor) -> dict[Edge, Tensor]:
        """In IEEE products: with truncated products, sums in another order can differ visibly."""
        with ieee_arithmetic():
            return gradients_at(self._graph, edges, weights_B, retain=True)


def _is_huge(g: Tensor) -> bool:
    """Whether a probe's weight could make some finite entry infinite."""
    largest = g.nan_to_num(0, 0, 0).abs().max() if g.numel() else g.new_zeros(())
    return bool(largest > torch.finfo(g.dtype).max / (2 * LARGEST_WEIGHT))
