"""Decides which nodes of a graph carry examples, and how the examples are laid out in each use.

Probing costs one extra backward pass. Its result is stored per outline (operations and wiring, no sizes). A result is
trusted after two batches agreed, and probed again later. A graph in which data can reorder rows is probed every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError, UnsupportedModelError
from clipwise.gradients.growth import Growth
from clipwise.gradients.layout import Layout, resized
from clipwise.gradients.movers import Reading, RowSource, mover_places, sources_of
from clipwise.gradients.outline import LOOKUPS, ROW_MOVERS, GraphPlan, Outline
from clipwise.gradients.probed_steps import Probing
from clipwise.gradients.probing import Prober
from clipwise.gradients.rules.registry import Begun, RuleDoesNotApply, begin, covers
from clipwise.gradients.walk import (
    USUAL_CAUSES,
    Edge,
    Graph,
    Node,
    Place,
    behind,
    node_name,
    output_shape,
    parameters_behind,
)
from clipwise.kernels.tracing import is_tracing

_AGREEING_BATCHES = 2
_PROBE_AGAIN_AFTER = 256
_MOST_SIGNATURES = 512
_SHARED_BUFFER = (
    "rows of all examples share one buffer, and the whole batch decides which row gets which slot, as in a mixture of "
    "experts with a capacity (GShard, Switch). When the buffer is full, the dropped rows of an example depend on the "
    "other examples, and no gradient shows it. Give each example its own group and capacity, or select the rows of "
    "each expert by an index, without a capacity. Batch(max_norm=...) clips whole microbatches instead."
)


@dataclass
class KnownLayouts:
    """The probe results for graphs with one outline."""

    carries_data: dict[int, bool]
    # At the uses and around the operations that can move rows. The first layout is used. The probes could not
    # distinguish the others from it.
    layouts: dict[Place, list[Layout]]
    sources: dict[Place, frozenset[RowSource]] = field(default_factory=dict)  # for rows in a data-dependent order
    agreed: int = 1
    used: int = 0
    plan: GraphPlan | None = None
    # The layouts for recent sizes.
    recalled: dict[tuple[int, tuple[torch.Size, ...]], Resolved] = field(default_factory=dict)


@dataclass
class Resolved:
    """The layouts at all outputs of a graph's uses; uses are identified by index."""

    layouts: dict[int, dict[int, Layout]]
    gradients: dict[Edge, Tensor] | None  # of the plain sum of losses, if probed
    doubts: dict[int, dict[int, list[Layout]]]  # alternatives that no probe could distinguish
    silent: frozenset[Place] = frozenset()  # where no gradient may arrive

    def disagreements(self, index: int, outputs: Mapping[int, Tensor]) -> list[Tensor]:
        """For each doubt of a use, whether a gradient is nonzero where two possible layouts have different owners."""
        return [
            (outputs[k].ne(0) & _differ(outputs[k], self.layouts[index][k], other)).any()
            for k, others in self.doubts.get(index, {}).items()
            for other in others
        ]


@dataclass
class Resolver:
    """Stores the findings of a run."""

    findings: dict[Outline, KnownLayouts] = field(default_factory=dict)
    kinds: dict[tuple[str, ...], bool | None] = field(default_factory=dict)  # None: differs between batches
    growths: dict[Outline, dict[int, Growth]] = field(default_factory=dict)
    probing: Probing = field(default_factory=Probing)

    def resolve(self, graph: Graph) -> Resolved:
        """Classify the graph and lay out its uses, from trusted findings if possible."""
        if len(self.findings) + len(self.growths) > _MOST_SIGNATURES:
            self.findings.clear()  # an unrolled network has a new graph for each sequence length
            self.growths.clear()
        found = self._recall(graph)
        if found is not None:
            self.probing.recent.append(False)
            return found
        self.probing.note(graph)
        return self.probe(graph)

    def _watch_growth(self, graph: Graph) -> None:
        """Raise if a tensor classified as DERIVED grows with the batch."""
        if not graph.plan.taken_for_derived or is_tracing():  # a trace is for one size, and its tensors have no values
            return
        growths = self.growths.setdefault(graph.outline, {})
        for index in graph.plan.taken_for_derived:
            node, growth = graph.order[index], growths.setdefault(index, Growth())
            edge = node, graph.outline.outputs[index][0]
            if growth.axes == {}:
                continue  # it did not follow the batch size once
            batch, selection = len(graph.losses), _selection(node)
            grows = growth.observe(output_shape(*edge), batch, selection)
            if not grows and (selection is not None or batch == 1 or not growth.has_followed):
                continue
            prober = Prober(graph)
            prober.at([edge])
            is_shared = prober.is_shared_buffer(edge)
            if grows or is_shared:
                raise CoupledExamplesError(
                    f"In the result of {node_name(node)} {_SHARED_BUFFER}"
                    if is_shared
                    else f"The result of {node_name(node)} grows with the batch, but none of its rows belongs to one "
                    f"example alone. {USUAL_CAUSES}"
                )

    def _recall(self, graph: Graph) -> Resolved | None:
        finding = self.findings.get(graph.outline)
        if finding is None or finding.agreed < _AGREEING_BATCHES:
            return None
        finding.used += 1
        if finding.used % _PROBE_AGAIN_AFTER == 0 and not is_tracing():
            return None
        if not graph.uses or graph.plan is not finding.plan:
            graph.classify(finding.carries_data)
            finding.plan = graph.outline.settled = graph.plan
        self._watch_growth(graph)
        batch = len(graph.losses)
        if graph.outline.moves_rows:
            places = [place for place, found in finding.layouts.items() if found]
            shapes = tuple(output_shape(graph.order[index], k) for index, k in places)
        else:
            places = []
            shapes = tuple(shape for use in graph.uses for shape in use.output_shapes)
        sizes = batch, shapes
        if sizes not in finding.recalled:
            places = places or [(use.index, k) for use in graph.uses for k in use.outputs]
            found = resized([finding.layouts.get(place, []) for place in places], shapes, batch)
            if found is None:
                return None
            if len(finding.recalled) >= _MOST_SIGNATURES:
                finding.recalled.clear()
            finding.recalled[sizes] = _resolved(dict(zip(places, found, strict=True)), None)
        recalled = finding.recalled[sizes]
        if not graph.outline.moves_rows:
            return recalled
        reading = Reading(graph, recalled.layouts, recalled.doubts, finding.sources)
        layouts = reading.layouts()
        self.probing.unread = reading.unread
        return None if layouts is None else replace(recalled, layouts=layouts, silent=frozenset(reading.silent))

    def probe(self, graph: Graph) -> Resolved:
        """Find the layouts by extra backward passes, and store them."""
        if is_tracing():
            raise UnsupportedModelError(
                "the layout of the examples is measured in every batch, because the data can move rows (an index, a "
                "sort, a gather)"
                if graph.outline.moves_rows
                else "the graph of the losses is not one of those of the steps before"
            )
        prober = Prober(graph)
        carries_data: dict[int, bool] = {}
        dead: set[int] = set()  # any answer is right on this batch, and none is stored
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
                # Selecting rows of a table looks the same as selecting rows of examples.
                picks = node_name(node) in ROW_MOVERS and carriers & behind({node})
                by_rule.update({node} if opinion is True and not picks else ())
            # If examples enter at a node, no node behind it carries them: if two nodes appear to, one does by chance.
            # Either choice is right on this batch, and neither is safe on the next.
            certain &= not carriers & behind(by_rule)
            graph.classify(carries_data)
        settled = {*graph.plan.taken_for_derived, *(use.index for use in graph.uses)}
        carries_data = {index: carries for index, carries in carries_data.items() if index in settled}
        if dead & settled:
            certain, self.probing.unread = False, max(dead & settled)
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
                if not (sure or graph.outline.moves_rows):
                    certain, self.probing.unread = False, use.index
                if not found:
                    place = f"At {use.describe(graph.names)}"
                    raise CoupledExamplesError(
                        f"{place} {_SHARED_BUFFER}"
                        if prober.is_shared_buffer((use.node, k))
                        else f"{place} a row of the computation belongs to several examples, so per-example gradients "
                        f"cannot be separated. {USUAL_CAUSES}"
                    )
                candidates[(use.index, k)] = found
        resolved = _resolved(candidates, {edge: prober.plain(edge) for edge in edges})
        if certain:
            self._remember(graph, carries_data, *self._with_movers(graph, prober, candidates))
        return replace(resolved, doubts={})  # on this batch all candidates give the same answer

    def _with_movers(
        self, graph: Graph, prober: Prober, candidates: dict[Place, list[Layout]]
    ) -> tuple[dict[Place, list[Layout]], dict[Place, frozenset[RowSource]]]:
        """Regular layouts of the uses and around the operations that can move rows, and where other rows come from."""
        if not graph.outline.moves_rows:
            return candidates, {}
        more = {place: (graph.order[place[0]], place[1]) for place in mover_places(graph) if place not in candidates}
        prober.at(list(more.values()))
        measured = candidates | {place: prober.settle(edge)[0] for place, edge in more.items()}
        sources, moved = sources_of(graph, measured)
        regular = {
            place: [] if place[0] in moved else [each for each in found if type(each) is Layout]
            for place, found in measured.items()
        }
        return regular, sources

    def _remember(
        self,
        graph: Graph,
        carries_data: dict[int, bool],
        layouts: dict[Place, list[Layout]],
        sources: dict[Place, frozenset[RowSource]],
    ) -> None:
        before = self.findings.get(graph.outline)
        if before and (before.carries_data, before.layouts.keys()) == (carries_data, layouts.keys()):
            # Another batch may distinguish what this batch could not.
            both = {key: _in_both(now, before.layouts[key]) for key, now in layouts.items()}
            known = {key: found & before.sources[key] for key, found in sources.items()}
            if all(found or known.get(key) for key, found in both.items()):
                before.layouts, before.sources, before.recalled = both, known, {}
                before.agreed += 1
                return
        unknown = [key for key, found in layouts.items() if not (found or sources.get(key))]
        if unknown:
            self.probing.unread = max(unknown)[0]
        else:
            self.findings[graph.outline] = KnownLayouts(carries_data, layouts, sources)


def _selection(node: Node) -> Tensor | None:
    """The indices of a node that selects rows of a table; None for other nodes."""
    name = LOOKUPS.get(node_name(node))
    saved = getattr(node, name) if name else None
    if isinstance(saved, tuple):  # table[ids] has one for each axis
        saved = saved[0] if len(saved) == 1 else None
    return saved


def _resolved(found: dict[Place, list[Layout]], gradients: dict[Edge, Tensor] | None) -> Resolved:
    """At each place, the first candidate is used and the others are doubts."""
    resolved = Resolved({}, gradients, {})
    for (index, k), layouts in found.items():
        resolved.layouts.setdefault(index, {})[k] = layouts[0]
        if len(layouts) > 1:
            resolved.doubts.setdefault(index, {})[k] = layouts[1:]
    return resolved


def _in_both(now: list[Layout], before: list[Layout]) -> list[Layout]:
    """The layouts that match one from an earlier batch, possibly of other sizes."""

    def kind(layout: Layout) -> tuple[int, bool, bool]:
        return layout.axis, layout.outer == 1, layout.inner == 1

    kinds = {kind(layout) for layout in before}
    return [layout for layout in now if kind(layout) in kinds]


def _differ(t: Tensor, one: Layout, other: Layout) -> Tensor:
    """Where two layouts of a tensor have different owners, in a shape that broadcasts to the tensor's."""
    first, second = (layout.broadcast(layout.owners(t.device), t.dim()) for layout in (one, other))
    return first != second


def _kind(node: Node, graph: Graph) -> tuple[str, ...]:
    """The operation and its parameters: identifies an open node in graphs of any shape."""
    return (node_name(node), *parameters_behind([node], graph.names))


def _carries_examples(node: Node, outputs: tuple[int, ...], prober: Prober, known: bool | None) -> bool | None:
    """Whether an open node's outputs have an example axis that is not a parameter's own axis.

    If sparse examples (one-hot inputs, say) each touch one block of a weight by chance, the weight seems to have an
    example axis. A rule knows which operand an axis comes from. Without a rule the answer is False or None (unknown).
    `known` is the answer from earlier batches.
    """
    shapes = {j: output_shape(n, nr) for j, (n, nr) in enumerate(node.next_functions) if n is not None}
    regular = {k: prober.layouts((node, k)) for k in outputs}
    try:
        (finish,) = begin((node, shapes)) if covers(node) else (None,)
    except CoupledExamplesError:  # raised again if the node turns out to be a use
        return None if all(regular.values()) else False
    if not all(regular.values()):
        return finish is not None and _carries_moved_rows(node, finish, regular, prober, known)
    if all(prober.is_silent((node, k)) and not prober.is_dead((node, k)) for k in outputs):
        # If bad examples made all rows non-finite, the rows are shared, unless all examples are bad.
        apart = all(any(prober.spares_some((node, k), layout) for layout in regular[k]) for k in outputs)
        return known if known is not None else apart or not prober.any_loss_is_finite()
    if finish is None:
        return None
    plain = {k: prober.plain((node, k)) for k in outputs}
    return any(_applies(finish, plain, dict(zip(outputs, each, strict=True))) for each in product(*regular.values()))


def _carries_moved_rows(
    node: Node, finish: Begun, regular: dict[int, list[Layout]], prober: Prober, known: bool | None
) -> bool:
    """Whether an open node's rows are rows of examples, in a data-dependent order or number.

    Only a rule can distinguish them from rows of a parameter that single examples touch by chance; treating the node as
    DERIVED is right as well. That fails if an example is not finite: a non-finite row may be its own or shared.
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
            f"An example is not finite, and at {node_name(node)} it is not known yet whether the data select the rows "
            "or all examples share them. Remove such examples from the data, or make them finite."
        )
    return finite


def _applies(finish: Begun, gradients: dict[int, Tensor], layouts: dict[int, Layout]) -> bool:
    try:
        finish(gradients, layouts)
    except RuleDoesNotApply:
        return False
    return True
