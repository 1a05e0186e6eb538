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
from clipwise.gradients.operations import ROW_MOVERS
from clipwise.gradients.outline import Outline
from clipwise.gradients.probing import Prober
from clipwise.gradients.rules.registry import FinishAll, RuleDoesNotApply, begin, covers
from clipwise.gradients.walk import (
    USUAL_CAUSES,
    Edge,
    Graph,
    Node,
    behind,
    node_name,
    output_shape,
    parameters_behind,
)

Place = tuple[int, int]  # a use's index and one of its outputs

_AGREEING_BATCHES = 2
_PROBE_AGAIN_AFTER = 256
_MOST_SIGNATURES = 512
_GROWN_BATCHES = 2
_SHARED_BUFFER = (
    "rows of all examples share one buffer, and the whole batch decides which row gets which place, as in a mixture of "
    "experts with a capacity (GShard, Switch). When places run out, which rows of an example are dropped depends on "
    "the other examples, and no gradient shows it. Make each example a group with a capacity of its own, or pick the "
    "rows of each expert by an index, without a capacity. Batch(max_norm=...) clips whole mini-sets instead."
)


@dataclass
class Finding:
    """What probes have shown of graphs with one outline."""

    carries_data: dict[int, bool]
    # The first layout is used; the probes could not tell the others from it.
    layouts: dict[Place, list[Layout]]
    agreed: int = 1
    used: int = 0
    # What was recalled last, with the sizes for which it holds.
    recalled: Resolved | None = None
    recalled_for: tuple[int, list[torch.Size]] | None = None


@dataclass
class Resolved:
    """A graph's layouts at all outputs of its uses; a use is known by its index."""

    layouts: dict[int, dict[int, Layout]]
    gradients: dict[Edge, Tensor] | None  # those of the plain sum of losses, if it was probed
    doubts: dict[int, dict[int, list[Layout]]]  # layouts that no probe could tell from the one that is used

    def disagreements(self, index: int, outputs: Mapping[int, Tensor]) -> list[Tensor]:
        """At each doubt of a use, whether a gradient is not 0 where two layouts that may both be right name two
        owners."""
        return [
            (outputs[k].ne(0) & _differ(outputs[k], self.layouts[index][k], other)).any()
            for k, others in self.doubts.get(index, {}).items()
            for other in others
        ]


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

    findings: dict[Outline, Finding] = field(default_factory=dict)
    kinds: dict[tuple[str, ...], bool | None] = field(default_factory=dict)  # None: now so, now not
    growths: dict[Outline, dict[int, Growth]] = field(default_factory=dict)

    def resolve(self, graph: Graph) -> Resolved:
        """Classify the graph and lay out its uses, from memory where that is trusted."""
        if len(self.findings) + len(self.growths) > _MOST_SIGNATURES:
            self.findings.clear()  # every sequence length of an unrolled network is a graph of its own
            self.growths.clear()
        return self._recall(graph) or self.probe(graph)

    def _watch_growth(self, graph: Graph) -> None:
        """What was taken for DERIVED must not grow with the batch."""
        if not graph.plan.taken_for_derived:
            return
        growths = self.growths.setdefault(graph.outline, {})
        for index in graph.plan.taken_for_derived:
            node, growth = graph.order[index], growths.setdefault(index, Growth())
            edge = node, graph.outline.outputs[index][0]
            if growth.observe(output_shape(*edge), len(graph.losses)):
                prober = Prober(graph)
                prober.at([edge])
                raise CoupledExamplesError(
                    f"In the result of {node_name(node)} {_SHARED_BUFFER}"
                    if prober.is_shared_buffer(edge)
                    else f"The result of {node_name(node)} grows with the batch, yet none of its rows belongs to one "
                    f"example alone. {USUAL_CAUSES}"
                )

    def _recall(self, graph: Graph) -> Resolved | None:
        finding = self.findings.get(graph.outline)
        if graph.outline.moves_rows or finding is None or finding.agreed < _AGREEING_BATCHES:
            return None
        finding.used += 1
        if finding.used % _PROBE_AGAIN_AFTER == 0:
            return None
        graph.classify(finding.carries_data)
        self._watch_growth(graph)
        batch = len(graph.losses)
        shapes = [shape for use in graph.uses for shape in use.output_shapes]
        if finding.recalled is None or finding.recalled_for != (batch, shapes):
            found: dict[Place, list[Layout]] = {}
            places = [(use.index, k) for use in graph.uses for k in use.outputs]
            for place, shape in zip(places, shapes, strict=True):
                found[place] = []
                for before in finding.layouts.get(place, [None]):
                    now = before.resized(shape, batch) if before else None
                    if now is None:
                        return None
                    found[place].append(now)
            finding.recalled, finding.recalled_for = _resolved(found, None), (batch, shapes)
        return finding.recalled

    def probe(self, graph: Graph) -> Resolved:
        """Find out by extra backward passes, and remember."""
        prober = Prober(graph)
        carries_data: dict[int, bool] = {}
        dead: set[int] = set()  # any answer is right on this batch, and none is remembered
        certain = True
        graph.classify(carries_data)
        while graph.plan.open:
            nodes = [(graph.order[index], index) for index in graph.plan.open]
            prober.at([(node, k) for node, index in nodes for k in graph.outline.outputs[index]])
            carriers: set[Node] = set()
            by_rule: set[Node] = set()
            for node, index in nodes:
                outputs = graph.outline.outputs[index]
                opinion = _carries_examples(node, outputs, prober, self.kinds.get(_kind(node, graph)))
                carries_data[index] = opinion is not False
                if all(prober.is_dead((node, k)) for k in outputs):
                    dead.add(index)
                    continue
                carriers.update({node} if opinion is not False else ())
                # To pick rows of a table looks the same as to pick rows of examples.
                picks = node_name(node) in ROW_MOVERS and carriers & behind({node})
                by_rule.update({node} if opinion is True and not picks else ())
            # If examples enter at a node, nothing behind it can have had them: of two that look so, one
            # does by chance. Either gives the right answer on this batch, and neither on the next.
            certain &= not carriers & behind(by_rule)
            graph.classify(carries_data)
        settled = {*graph.plan.taken_for_derived, *(use.index for use in graph.uses)}
        carries_data = {index: carries for index, carries in carries_data.items() if index in settled}
        certain &= not dead & settled
        if prober.is_finite():
            for index, carries in carries_data.items():
                kind = _kind(graph.order[index], graph)
                self.kinds[kind] = carries if self.kinds.get(kind, carries) is carries else None
        self._watch_growth(graph)

        candidates: dict[Place, list[Layout]] = {}
        edges = [(use.node, k) for use in graph.uses for k in use.outputs]
        prober.at(edges)
        for use in graph.uses:
            for k in use.outputs:
                found, sure = prober.settle((use.node, k))
                certain &= sure
                if not found:
                    place = f"At {use.describe(graph.names)}"
                    raise CoupledExamplesError(
                        f"{place} {_SHARED_BUFFER}"
                        if prober.is_shared_buffer((use.node, k))
                        else f"{place} a row of the computation belongs to several examples, so per-example gradients "
                        f"cannot be told apart. {USUAL_CAUSES}"
                    )
                candidates[(use.index, k)] = found
        if certain and not graph.outline.moves_rows:
            self._remember(graph, carries_data, candidates)
        resolved = _resolved(candidates, {edge: prober.plain(edge) for edge in edges})
        return replace(resolved, doubts={})  # on this batch all candidates give the same answer

    def _remember(
        self, graph: Graph, carries_data: dict[int, bool], candidates: dict[Place, list[Layout]]
    ) -> None:
        before = self.findings.get(graph.outline)
        if before and (before.carries_data, before.layouts.keys()) == (carries_data, candidates.keys()):
            # What one batch could not tell apart another one may.
            both = {key: _in_both(now, before.layouts[key]) for key, now in candidates.items()}
            if all(both.values()):
                before.layouts, before.recalled = both, None
                before.agreed += 1
                return
        self.findings[graph.outline] = Finding(carries_data, candidates)


def _resolved(found: dict[Place, list[Layout]], gradients: dict[Edge, Tensor] | None) -> Resolved:
    """The first candidate is used at each place; the others are doubts."""
    resolved = Resolved({}, gradients, {})
    for (index, k), layouts in found.items():
        resolved.layouts.setdefault(index, {})[k] = layouts[0]
        if len(layouts) > 1:
            resolved.doubts.setdefault(index, {})[k] = layouts[1:]
    return resolved


def _in_both(now: list[Layout], before: list[Layout]) -> list[Layout]:
    """Those layouts that are of a kind with one of an earlier batch, whose sizes may have been others."""

    def kind(layout: Layout) -> tuple[int, bool, bool]:
        return layout.axis, layout.outer == 1, layout.inner == 1

    kinds = {kind(layout) for layout in before}
    return [layout for layout in now if kind(layout) in kinds]


def _differ(t: Tensor, one: Layout, other: Layout) -> Tensor:
    """Where two layouts of a tensor name different owners, in a shape that broadcasts to the tensor's."""
    first, second = (layout.broadcast(layout.owners(t.device), t.dim()) for layout in (one, other))
    return first != second


def _kind(node: Node, graph: Graph) -> tuple[str, ...]:
    """The operation and its parameters: what an open node is called in graphs of any shape."""
    return (node_name(node), *parameters_behind([node], graph.names))


def _carries_examples(
    node: Node, outputs: tuple[int, ...], prober: Prober, known: bool | None
) -> bool | None:
    """Whether examples can be laid out in an open node's outputs, and not along a parameter's own axis.

    Sparse examples (one-hot inputs, say) that happen to touch one block of a weight each look as if the
    weight itself had examples. A rule knows from which operand an axis comes; without one the answer, if
    it is not no, is None. `known` is what earlier batches showed.
    """
    shapes = {j: output_shape(n, nr) for j, (n, nr) in enumerate(node.next_functions) if n is not None}
    regular = {k: prober.layouts((node, k)) for k in outputs}
    try:
        finish = begin(node, shapes) if covers(node) else None
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


def _applies(finish: FinishAll, gradients: dict[int, Tensor], layouts: dict[int, Layout]) -> bool:
    try:
        finish(gradients, layouts)
    except RuleDoesNotApply:
        return False
    return True
