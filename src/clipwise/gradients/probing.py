"""The probes of one graph: extra backward passes with weighted losses, made as they are asked for.

layout.py says what a probe shows of one tensor, and owners.py how the owner of a row is read from several.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.layout import LARGEST_WEIGHT, Layout, Probe, hypotheses, probe_weights, surviving
from clipwise.gradients.owners import Numbers, Ragged
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Edge, Graph, gradients_at

_EXTRA_PROBES = 4
_TOGETHER = 16  # edges


class Prober:
    """The probes of one graph, made as they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._plain: dict[Edge, Tensor] = {}
        self._last: tuple[object, list[Probe]] | None = None
        self._thrice: dict[Edge, Tensor] = {}  # where no layout agreed: how much may be rounding (layout.py)
        self._weigh(1.0)

    def _weigh(self, unit: float) -> None:
        """Begin with new weights, which are powers of two times `unit`."""
        losses, self._unit = self._graph.losses, unit
        self._numbers = Numbers(len(losses), losses, unit)
        self._random = probe_weights(len(losses), losses) * unit
        # Where data can move rows, two examples must not share a weight: a swap of the two would not be seen.
        self._weights = list(self._numbers.weights) if self._graph.outline.moves_rows else [self._random]
        self._weighted: dict[Edge, list[Tensor]] = {e: [] for e in self._plain}

    def at(self, edges: list[Edge]) -> None:
        """Make sure of the probes at these edges."""
        new = [e for e in edges if e not in self._plain]
        if new:
            self._plain.update(self._backward(new, torch.ones_like(self._graph.losses)))
            self._weighted.update({e: [] for e in new})
            if self._unit == 1 and any(_is_huge(self._plain[e]) for e in new):
                # Or the rows of one huge example would overflow, and say nothing.
                self._weigh(1 / LARGEST_WEIGHT)
        self._complete()

    def plain(self, edge: Edge) -> Tensor:
        """The gradient of the plain sum of losses."""
        return self._plain[edge]

    def is_dead(self, edge: Edge) -> bool:
        """No gradient at all arrives here, so this batch decides nothing."""
        return all(probe.is_dead() for probe in self._probes(edge))

    def is_silent(self, edge: Edge) -> bool:
        """Nothing arrives here but what is not finite, or 0."""
        return all(probe.is_silent() for probe in self._probes(edge))

    def spares_some(self, edge: Edge, layout: Layout) -> bool:
        """Whether some example's rows would all be finite."""
        return bool(torch.isfinite(layout.split(self._plain[edge])).flatten(1).all(1).any())

    def any_loss_is_finite(self) -> bool:
        """Whether some example is healthy at the very end."""
        return bool(torch.isfinite(self._graph.losses).any())

    def is_finite(self) -> bool:
        """Whether all examples are, as far as the probes saw."""
        return all(bool(torch.isfinite(g).all()) for g in self._plain.values())

    def layouts(self, edge: Edge) -> list[Layout]:
        """The regular layouts that survive all probes."""
        probes = self._probes(edge)
        found = surviving(probes)
        if not found and edge not in self._thrice and not probes[0].repeats:
            edges = list(self._plain)
            place = edges.index(edge)
            # Those that come next will ask for it, too; all at once would take as much memory as the graph.
            some = edges[place : place + _TOGETHER]
            self._thrice = self._backward(some, torch.full_like(self._graph.losses, 3.0))
            found = surviving(self._probes(edge))
        return found

    def ragged(self, edge: Edge) -> Ragged | None:
        """The layout with rows in an order or a number of their own, if every row has one owner."""
        return self._numbers.read(self._spelled_out(edge))

    def is_shared_buffer(self, edge: Edge) -> bool:
        """Whether each row has one owner if two axes are taken together: a buffer with places for rows of any example.

        As [experts, capacity, ...] in a mixture of experts, where one place holds another example in each expert.
        """
        probes = self._spelled_out(edge)
        for axis in range(self._plain[edge].dim() - 1):
            flat = [
                Probe(p.plain.flatten(axis, axis + 1), p.weighted.flatten(axis, axis + 1), p.weights_B)
                for p in probes
            ]
            if self._numbers.read(flat) is not None:
                return True
        return False

    def _spelled_out(self, edge: Edge) -> list[Probe]:
        """The probes of an edge, with those among them from which owners can be read."""
        for weights_B in (*self._numbers.weights, self._random):
            if not any(weights_B is w for w in self._weights):
                self._weights.append(weights_B)
        self._complete()
        return self._probes(edge)

    def settle(self, edge: Edge) -> tuple[list[Layout], bool]:
        """The layouts that may be right at an edge, and whether they may be so on another batch as well.

        Layouts that several probes cannot tell from one another give, on this batch, the same answer.
        """
        plain, batch = self._plain[edge], len(self._graph.losses)
        if self.is_dead(edge):
            regular = list(hypotheses(plain.shape, batch))
            if regular:
                return regular, True
        if self.is_silent(edge):
            nobody = Ragged.of_nobody(plain.shape, batch, plain.device)
            return [nobody] if nobody else [], False
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
        """What was worked out of the last edge is kept: several questions in a row are about the same one."""
        made = (edge, len(self._weighted[edge]), edge in self._thrice, self._unit)
        if self._last is None or self._last[0] != made:
            self._last = made, self._new_probes(edge)
        return self._last[1]

    def _new_probes(self, edge: Edge) -> list[Probe]:
        pairs = zip(self._weighted[edge], self._weights, strict=True)
        thrice = self._thrice.get(edge)
        return [Probe(self._plain[edge], weighted, weights_B, thrice) for weighted, weights_B in pairs]

    def _complete(self) -> None:
        """One backward pass for each weighting that some edges still lack."""
        for k, weights_B in enumerate(self._weights):
            lacking = [e for e, made in self._weighted.items() if len(made) == k]
            for edge, g in self._backward(lacking, weights_B).items():
                self._weighted[edge].append(g)

    def _backward(self, edges: list[Edge], weights_B: Tensor) -> dict[Edge, Tensor]:
        """In IEEE products: where others cut digits off, sums in an order of their own can differ by visible ones."""
        with ieee_arithmetic():
            return gradients_at(self._graph, edges, weights_B, retain=True)


def _is_huge(g: Tensor) -> bool:
    """Whether some finite entry is so large that a probe's weight could make it infinite."""
    largest = g.nan_to_num(0, 0, 0).abs().max() if g.numel() else g.new_zeros(())
    return bool(largest > torch.finfo(g.dtype).max / (2 * LARGEST_WEIGHT))
