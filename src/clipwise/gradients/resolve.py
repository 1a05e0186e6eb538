"""Settle what a graph leaves open: which nodes carry examples, and how examples lie in each use.

Probing costs one extra backward pass. What it shows is remembered by the graph's signature (operations
and how they are wired, no sizes) and trusted once two batches agreed on it, until it is put to the test
again; a graph in which data can move rows about is probed every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.layout import Layout, Probe, probe_weights
from clipwise.gradients.rules import FinishAll, RuleDoesNotApply, begin
from clipwise.gradients.walk import Graph, Node, gradients_at, node_name, output_shape

_AGREEING_BATCHES = 2
_PROBE_AGAIN_AFTER = 256
_EXTRA_PROBES = 4
_MOST_SIGNATURES = 512
_GROWN_BATCHES = 2

Edge = tuple[Node, int]


@dataclass
class Finding:
    """What probes have shown of graphs with one signature."""

    carries_data: dict[int, bool]
    layouts: dict[tuple[int, int], Layout]
    agreed: int = 1
    used: int = 0


@dataclass
class Growth:
    """Whether a tensor grows with the batch. One that is made of parameters alone does not.

    `axes` holds the axes whose size has been the same multiple of the batch's so far.
    """

    axes: dict[int, float] | None = None
    batch: int = 0
    grown: int = 0

    def observe(self, shape: torch.Size, batch: int) -> bool:
        """Take one batch in; True once the tensor has followed the batch's size twice."""
        ratios = {axis: size / batch for axis, size in enumerate(shape) if size and size % batch == 0}
        if self.axes is None:
            self.axes = ratios
        else:
            self.axes = {axis: r for axis, r in self.axes.items() if ratios.get(axis) == r}
            self.grown += batch != self.batch
        self.batch = batch
        return bool(self.axes) and self.grown >= _GROWN_BATCHES


@dataclass
class Resolver:
    """Owned by a run; remembers findings from batch to batch."""

    findings: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    growths: dict[tuple[object, ...], dict[int, Growth]] = field(default_factory=dict)

    def resolve(self, graph: Graph) -> tuple[dict[Edge, Layout], dict[Edge, Tensor] | None]:
        """Classify the graph. Returns layouts of all use outputs and, if it probed, their gradients."""
        if len(self.findings) + len(self.growths) > _MOST_SIGNATURES:
            self.findings.clear()  # every sequence length of an unrolled network is a graph of its own
            self.growths.clear()
        known = self._recall(graph)
        if known is not None:
            return known, None
        return self._probe(graph)

    def _watch_growth(self, graph: Graph) -> None:
        """What was taken for DERIVED must not grow with the batch."""
        if not graph.taken_for_derived:
            return
        growths = self.growths.setdefault(graph.signature, {})
        for node, index in graph.taken_for_derived:
            growth = growths.setdefault(index, Growth())
            if growth.observe(output_shape(node, min(graph.consumed[node])), len(graph.losses)):
                raise CoupledExamplesError(
                    f"The result of {node_name(node)} grows with the batch, yet none of its rows belongs to one "
                    "example alone. Usual causes: batch statistics, subtracting a mean over the batch, a loss "
                    "that compares examples. Compute each example's loss from that example alone."
                )

    def _recall(self, graph: Graph) -> dict[Edge, Layout] | None:
        finding = self.findings.get(graph.signature)
        if graph.moves_rows or finding is None or finding.agreed < _AGREEING_BATCHES:
            return None
        finding.used += 1
        if finding.used % _PROBE_AGAIN_AFTER == 0:
            return None
        graph.classify(finding.carries_data)
        self._watch_growth(graph)
        layouts: dict[Edge, Layout] = {}
        for use in graph.uses:
            for number in use.outputs:
                before = finding.layouts.get((use.index, number))
                shape = output_shape(use.node, number)
                now = before.resized(shape, len(graph.losses)) if before else None
                if before is None or now is None or before.is_stiff(now):
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
            carriers: set[Node] = set()
            by_rule: set[Node] = set()
            for node, index in graph.open:
                here = {k: probes[(node, k)] for k in graph.consumed[node]}
                opinion = _carries_examples(node, here)
                carries_data[index] = opinion is not False
                if all(
                    p.is_dead() for p in here.values()
                ):  # any answer is right on this batch, and none remembered
                    certain = False
                    continue
                carriers.update({node} if opinion is not False else ())
                by_rule.update({node} if opinion is True else ())
            # If examples enter at a node, nothing behind it can have had them: of two that look so, one
            # does by chance. Either gives the right answer on this batch, and neither on the next.
            certain &= not carriers & _behind(by_rule)
            graph.classify(carries_data)
        settled = {index for _, index in graph.taken_for_derived} | {use.index for use in graph.uses}
        carries_data = {index: carries for index, carries in carries_data.items() if index in settled}
        self._watch_growth(graph)

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


def _carries_examples(node: Node, probes: Mapping[int, Probe]) -> bool | None:
    """Whether examples can be laid out in an open node's outputs, and not along a parameter's own axis.

    Sparse examples (one-hot inputs, say) that happen to touch one block of a weight each look as if the
    weight itself had examples. A rule knows from which operand an axis comes; without one the answer, if
    it is not no, is None.
    """
    if not all(p.layouts() for p in probes.values()):
        return False
    shapes = {j: output_shape(n, nr) for j, (n, nr) in enumerate(node.next_functions) if n is not None}
    try:
        finish = begin(node, shapes) if set(probes) == {0} else None
    except CoupledExamplesError:  # comes again if the node turns out to be a use
        return None
    if finish is None:
        return None
    return any(_applies(finish, probes[0].plain, layout) for layout in probes[0].layouts())


def _behind(nodes: set[Node]) -> set[Node]:
    """All nodes that feed these."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in found:
                found.add(child)
                stack.append(child)
    return found


def _applies(finish: FinishAll, g: torch.Tensor, layout: Layout) -> bool:
    try:
        finish({0: g}, {0: layout})
    except RuleDoesNotApply:
        return False
    return True


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
