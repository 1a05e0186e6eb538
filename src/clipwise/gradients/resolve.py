"""Settle what a graph leaves open: which nodes carry examples, and how examples lie in each use.

Probing costs one extra backward pass. What it shows is remembered by the graph's signature (operations
and how they are wired, no sizes) and trusted once two batches agreed on it, until it is put to the test
again; a graph in which data can move rows about is probed every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError, UnsupportedModelError
from clipwise.gradients.layout import Layout
from clipwise.gradients.probing import Prober
from clipwise.gradients.rules import FinishAll, RuleDoesNotApply, begin
from clipwise.gradients.walk import (
    ROW_MOVERS,
    Edge,
    Graph,
    Node,
    node_name,
    output_shape,
    parameters_behind,
)

_AGREEING_BATCHES = 2
_PROBE_AGAIN_AFTER = 256
_MOST_SIGNATURES = 512
_GROWN_BATCHES = 2


@dataclass
class Finding:
    """What probes have shown of graphs with one signature."""

    carries_data: dict[int, bool]
    # The first layout is used; the probes could not tell the others from it.
    layouts: dict[tuple[int, int], list[Layout]]
    agreed: int = 1
    used: int = 0


@dataclass
class Resolved:
    """A graph's layouts at all outputs of its uses."""

    layouts: dict[Edge, Layout]
    gradients: dict[Edge, Tensor] | None  # those of the plain sum of losses, if it was probed
    doubts: dict[Edge, list[Layout]]  # layouts that no probe could tell from the one that is used

    def is_beyond_doubt(self, gradients: Mapping[Edge, Tensor]) -> bool:
        """Whether the gradients are 0 wherever two layouts that may both be right name different owners."""
        return not any(
            bool((gradients[edge].ne(0) & _differ(gradients[edge], self.layouts[edge], other)).any())
            for edge, others in self.doubts.items()
            for other in others
        )


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
    kinds: dict[tuple[str, ...], bool | None] = field(default_factory=dict)  # None: now so, now not
    growths: dict[tuple[object, ...], dict[int, Growth]] = field(default_factory=dict)

    def resolve(self, graph: Graph) -> Resolved:
        """Classify the graph and lay out its uses, from memory where that is trusted."""
        if len(self.findings) + len(self.growths) > _MOST_SIGNATURES:
            self.findings.clear()  # every sequence length of an unrolled network is a graph of its own
            self.growths.clear()
        return self._recall(graph) or self.probe(graph)

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

    def _recall(self, graph: Graph) -> Resolved | None:
        finding = self.findings.get(graph.signature)
        if graph.moves_rows or finding is None or finding.agreed < _AGREEING_BATCHES:
            return None
        finding.used += 1
        if finding.used % _PROBE_AGAIN_AFTER == 0:
            return None
        graph.classify(finding.carries_data)
        self._watch_growth(graph)
        found: dict[Edge, list[Layout]] = {}
        for use in graph.uses:
            for number in use.outputs:
                shape = output_shape(use.node, number)
                found[(use.node, number)] = []
                for before in finding.layouts.get((use.index, number), [None]):
                    now = before.resized(shape, len(graph.losses)) if before else None
                    if before is None or now is None or before.is_stiff(now):
                        return None
                    found[(use.node, number)].append(now)
        return _resolved(found, None)

    def probe(self, graph: Graph) -> Resolved:
        """Find out by extra backward passes, and remember."""
        prober = Prober(graph)
        carries_data: dict[int, bool] = {}
        dead: set[int] = set()  # any answer is right on this batch, and none is remembered
        certain = True
        graph.classify(carries_data)
        while graph.open:
            prober.at([(node, k) for node, _ in graph.open for k in graph.consumed[node]])
            carriers: set[Node] = set()
            by_rule: set[Node] = set()
            for node, index in graph.open:
                opinion = _carries_examples(
                    node, graph.consumed[node], prober, self.kinds.get(_kind(node, graph))
                )
                carries_data[index] = opinion is not False
                if all(prober.is_dead((node, k)) for k in graph.consumed[node]):
                    dead.add(index)
                    continue
                carriers.update({node} if opinion is not False else ())
                # To pick rows of a table looks the same as to pick rows of examples.
                picks = node_name(node) in ROW_MOVERS and carriers & _behind({node})
                by_rule.update({node} if opinion is True and not picks else ())
            # If examples enter at a node, nothing behind it can have had them: of two that look so, one
            # does by chance. Either gives the right answer on this batch, and neither on the next.
            certain &= not carriers & _behind(by_rule)
            graph.classify(carries_data)
        settled = {index for _, index in graph.taken_for_derived} | {use.index for use in graph.uses}
        carries_data = {index: carries for index, carries in carries_data.items() if index in settled}
        certain &= not dead & settled
        if prober.is_finite():
            for index, carries in carries_data.items():
                kind = _kind(graph.order[index], graph)
                self.kinds[kind] = carries if self.kinds.get(kind, carries) is carries else None
        self._watch_growth(graph)

        candidates: dict[Edge, list[Layout]] = {}
        edges = [(use.node, k) for use in graph.uses for k in use.outputs]
        prober.at(edges)
        for use in graph.uses:
            for k in use.outputs:
                found, sure = prober.settle((use.node, k))
                certain &= sure
                if not found:
                    raise CoupledExamplesError(
                        f"At {use.describe(graph.names)} a row of the computation belongs to several "
                        "examples, so per-example gradients cannot be told apart. Usual causes: batch "
                        "statistics, subtracting a mean over the batch, a loss that compares examples. Compute "
                        "each example's loss from that example alone."
                    )
                candidates[(use.node, k)] = found
        self._remember(graph, carries_data, candidates, certain)
        resolved = _resolved(candidates, {edge: prober.plain(edge) for edge in edges})
        return replace(resolved, doubts={})  # on this batch all candidates give the same answer

    def _remember(
        self, graph: Graph, carries_data: dict[int, bool], candidates: dict[Edge, list[Layout]], certain: bool
    ) -> None:
        if not certain or graph.moves_rows:
            return
        by_index = {(use.index, k): candidates[(use.node, k)] for use in graph.uses for k in use.outputs}
        before = self.findings.get(graph.signature)
        if (
            before is not None
            and before.carries_data == carries_data
            and before.layouts.keys() == by_index.keys()
        ):
            # What one batch could not tell apart another one may.
            both = {key: _in_both(now, before.layouts[key]) for key, now in by_index.items()}
            if all(both.values()):
                before.layouts = both
                before.agreed += 1
                return
        self.findings[graph.signature] = Finding(carries_data, by_index)


def _resolved(found: dict[Edge, list[Layout]], gradients: dict[Edge, Tensor] | None) -> Resolved:
    """The first candidate is used at each edge; the others are doubts."""
    return Resolved(
        {edge: layouts[0] for edge, layouts in found.items()},
        gradients,
        {edge: layouts[1:] for edge, layouts in found.items() if len(layouts) > 1},
    )


def _in_both(now: list[Layout], before: list[Layout]) -> list[Layout]:
    """Those layouts that are of a kind with one of an earlier batch, whose sizes may have been others."""

    def kind(layout: Layout) -> tuple[int, bool, bool]:
        return layout.axis, layout.outer == 1, layout.inner == 1

    kinds = {kind(layout) for layout in before}
    return [layout for layout in now if kind(layout) in kinds]


def _differ(t: Tensor, one: Layout, other: Layout) -> Tensor:
    """Where two layouts of a tensor name different owners, in a shape that broadcasts to the tensor's."""
    shapes = [[-1 if d == layout.axis else 1 for d in range(t.dim())] for layout in (one, other)]
    owners = [layout.owners(t.device).view(shape) for layout, shape in zip((one, other), shapes, strict=True)]
    return owners[0] != owners[1]


def _kind(node: Node, graph: Graph) -> tuple[str, ...]:
    """The operation and its parameters: what an open node is called in graphs of any shape."""
    return (node_name(node), *parameters_behind([node], graph.names))


def _carries_examples(node: Node, outputs: set[int], prober: Prober, known: bool | None) -> bool | None:
    """Whether examples can be laid out in an open node's outputs, and not along a parameter's own axis.

    Sparse examples (one-hot inputs, say) that happen to touch one block of a weight each look as if the
    weight itself had examples. A rule knows from which operand an axis comes; without one the answer, if
    it is not no, is None. `known` is what earlier batches showed.
    """
    shapes = {j: output_shape(n, nr) for j, (n, nr) in enumerate(node.next_functions) if n is not None}
    regular = {k: prober.layouts((node, k)) for k in outputs}
    try:
        finish = begin(node, shapes)
    except CoupledExamplesError:  # comes again if the node turns out to be a use
        return None if all(regular.values()) else False
    if not all(regular.values()):
        return finish is not None and _carries_moved_rows(node, finish, regular, prober, known)
    if all(prober.is_silent((node, k)) and not prober.is_dead((node, k)) for k in outputs):
        # If bad examples made the rows of all so, then the rows are shared, unless all examples are bad.
        apart = all(any(prober.spares_some((node, k), layout) for layout in regular[k]) for k in outputs)
        return known if known is not None else apart or not prober.any_loss_is_finite()
    if finish is None:
        return None
    plain = {k: prober.plain((node, k)) for k in outputs}
    return any(
        _applies(finish, plain, dict(zip(outputs, each, strict=True))) for each in product(*regular.values())
    )


def _carries_moved_rows(
    node: Node, finish: FinishAll, regular: dict[int, list[Layout]], prober: Prober, known: bool | None
) -> bool:
    """Whether an open node's rows are those of examples, in an order or a number of their own.

    Only a rule can tell them from rows of a parameter, each of which may be touched by one example by chance;
    and to take the node for DERIVED is right as well. Not so where an example is not finite: a row that it
    made so may be its own, or one that all share.
    """
    plain = {k: prober.plain((node, k)) for k in regular}
    finite = all(bool(torch.isfinite(g).all()) for g in plain.values())
    if known is not None and not finite:
        return known
    layouts: dict[int, Layout] = {}
    for k, found in regular.items():
        layout = found[0] if found else prober.ragged((node, k))
        if layout is None:
            return False
        layouts[k] = layout
    if not _applies(finish, plain, layouts):
        return False
    if not finite and not all(prober.is_silent((node, k)) for k in regular):
        raise UnsupportedModelError(
            f"An example is not finite, and at {node_name(node)} it cannot be told yet whether the data choose the "
            "rows or all examples share them. Leave such examples out of the data, or make them finite."
        )
    return finite


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


def _applies(finish: FinishAll, gradients: dict[int, Tensor], layouts: dict[int, Layout]) -> bool:
    try:
        finish(gradients, layouts)
    except RuleDoesNotApply:
        return False
    return True
