"""Settle what a graph leaves open: which nodes carry examples, and how examples lie in each use.

Probing costs one extra backward pass. What it shows is remembered by the graph's signature (operations
and how they are wired, no sizes) and trusted once two batches agreed on it, until it is put to the test
again; a graph in which data can move rows about is probed every time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.layout import Layout, Probe, probe_weights
from clipwise.gradients.walk import Graph, Node, gradients_at, output_shape

_AGREEING_BATCHES = 2
_PROBE_AGAIN_AFTER = 256
_EXTRA_PROBES = 4

Edge = tuple[Node, int]


@dataclass
class Finding:
    """What probes have shown of graphs with one signature."""

    carries_data: dict[int, bool]
    layouts: dict[tuple[int, int], Layout]
    agreed: int = 1
    used: int = 0


@dataclass
class Resolver:
    """Owned by a run; remembers findings from batch to batch."""

    findings: dict[tuple[object, ...], Finding] = field(default_factory=dict)

    def resolve(self, graph: Graph) -> tuple[dict[Edge, Layout], dict[Edge, Tensor] | None]:
        """Classify the graph. Returns layouts of all use outputs and, if it probed, their gradients."""
        known = self._recall(graph)
        if known is not None:
            return known, None
        return self._probe(graph)

    def _recall(self, graph: Graph) -> dict[Edge, Layout] | None:
        finding = self.findings.get(graph.signature)
        if graph.moves_rows or finding is None or finding.agreed < _AGREEING_BATCHES:
            return None
        finding.used += 1
        if finding.used % _PROBE_AGAIN_AFTER == 0:
            return None
        graph.classify(finding.carries_data)
        layouts: dict[Edge, Layout] = {}
        for use in graph.uses:
            for number in use.outputs:
                before = finding.layouts.get((use.index, number))
                shape = output_shape(use.node, number)
                now = before.resized(shape, len(graph.losses)) if before else None
                if now is None:
                    return None
                layouts[(use.node, number)] = now
        return layouts

    def _probe(self, graph: Graph) -> tuple[dict[Edge, Layout], dict[Edge, Tensor]]:
        prober = _Prober(graph)
        carries_data: dict[int, bool] = {}
        certain = True
        graph.classify(carries_data)
        while graph.open:
            probes = prober.at([(node, k) for node, _ in graph.open for k in graph.consumed[node]])
            for node, index in graph.open:
                here = [probes[(node, k)] for k in graph.consumed[node]]
                dead = all(p.is_dead() for p in here)
                certain &= not dead
                # With no gradient at all, every layout gives the same answer: zero.
                carries_data[index] = all(p.first_layout() if dead else p.layouts() for p in here)
            graph.classify(carries_data)

        layouts: dict[Edge, Layout] = {}
        edges = [(use.node, k) for use in graph.uses for k in use.outputs]
        probes = prober.at(edges)
        for use in graph.uses:
            for k in use.outputs:
                found, sure = prober.settle((use.node, k))
                certain &= sure
                if found is None:
                    raise CoupledExamplesError(
                        f"At {use.describe(graph.names)} a row of the computation belongs to several "
                        "examples, or rows were reordered, so per-example gradients cannot be told apart. "
                        "Usual causes: batch statistics, subtracting a mean over the batch, a loss that "
                        "compares examples, sorting or selecting rows. Compute each example's loss from that "
                        "example alone, in the order of the batch."
                    )
                layouts[(use.node, k)] = found
        self._remember(graph, carries_data, layouts, certain)
        return layouts, {edge: probes[edge].plain for edge in edges}

    def _remember(
        self, graph: Graph, carries_data: dict[int, bool], layouts: dict[Edge, Layout], certain: bool
    ) -> None:
        if not certain or graph.moves_rows:
            return
        by_index = {(use.index, k): layouts[(use.node, k)] for use in graph.uses for k in use.outputs}
        kinds = {key: (v.axis, v.outer == 1, v.inner == 1) for key, v in by_index.items()}
        before = self.findings.get(graph.signature)
        if before is not None and before.carries_data == carries_data:
            same = {key: (v.axis, v.outer == 1, v.inner == 1) for key, v in before.layouts.items()} == kinds
            if same:
                before.agreed += 1
                return
        self.findings[graph.signature] = Finding(carries_data, by_index)


class _Prober:
    """The probes of one graph, made as they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._probes: dict[Edge, Probe] = {}

    def at(self, edges: list[Edge]) -> dict[Edge, Probe]:
        new = [e for e in edges if e not in self._probes]
        if new:
            losses = self._graph.losses
            weights_B = probe_weights(len(losses), losses)
            plain = gradients_at(self._graph, new, torch.ones_like(losses), retain=True)
            weighted = gradients_at(self._graph, new, weights_B, retain=True)
            self._probes.update({e: Probe(plain[e], weighted[e], weights_B) for e in new})
        return {e: self._probes[e] for e in edges}

    def settle(self, edge: Edge) -> tuple[Layout | None, bool]:
        """The layout at an edge, and whether it is beyond doubt (more than this batch's rows say so).

        A layout that several probes cannot tell from another gives, on this batch, the same answer.
        """
        probe = self._probes[edge]
        if probe.is_dead():
            return probe.first_layout(), False
        left = probe.layouts()
        for _ in range(_EXTRA_PROBES):
            if len(left) <= 1:
                break
            weights_B = probe_weights(len(self._graph.losses), self._graph.losses)
            weighted = gradients_at(self._graph, [edge], weights_B, retain=True)[edge]
            again = Probe(probe.plain, weighted, weights_B)
            left = [layout for layout in left if again.agrees(layout)]
        return (left[0] if left else None), len(left) == 1
