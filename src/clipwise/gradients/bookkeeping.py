"""From a vector of losses to the gradient of every example, from the gradients that one pass leaves behind.

    walk -> resolve (layouts) -> rules or fallback (forms) -> join by parameter

The result gives norms and weighted sums. Nothing here knows about privacy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipwise.gradients import fallback, selfcheck
from clipwise.gradients.derived import Path, Paths
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import Form, Written
from clipwise.gradients.join import Contribution, join
from clipwise.gradients.layout import Layout
from clipwise.gradients.outline import Outline, Plan
from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import Rare
from clipwise.gradients.resolve import Resolved, Resolver
from clipwise.gradients.rules import RuleDoesNotApply, begin
from clipwise.gradients.selfcheck import Operand, Trust, has_gradient
from clipwise.gradients.walk import (
    Edge,
    Graph,
    Outlines,
    Use,
    dtype_at,
    gradients_at,
    node_name,
    output_shape,
)

_MOST_OUTLINES = 512


class FallbackWarning(UserWarning):
    """An operation has no rule of its own: its gradients are exact, and slow."""


@dataclass
class Memory:
    """What a run goes by, and what it remembers from batch to batch."""

    arithmetic: Arithmetic = IEEE
    rare: Rare = field(default_factory=Rare)
    outlines: Outlines = field(default_factory=Outlines)
    resolver: Resolver = field(default_factory=Resolver)
    paths: dict[Plan, Paths] = field(default_factory=dict)
    fallbacks: set[str] = field(default_factory=set)
    trusts: dict[Outline, Trust] = field(default_factory=dict)
    fits: dict[tuple[object, ...], bool] = field(
        default_factory=dict
    )  # which batches book-keeping has room for

    def trust_in(self, outline: Outline) -> Trust:
        """What has been compared with plain autograd in graphs of this kind."""
        if outline not in self.trusts and len(self.trusts) >= _MOST_OUTLINES:
            self.trusts.clear()
        return self.trusts.setdefault(outline, Trust())

    def paths_of(self, graph: Graph, parameters: Parameters) -> list[dict[int, Path]]:
        """Of each use, the paths of its operands."""
        if graph.plan not in self.paths:
            if len(self.paths) >= _MOST_OUTLINES:
                self.paths.clear()
            self.paths[graph.plan] = Paths(graph.plan)
        return self.paths[graph.plan].through(graph.order, parameters)


class Book:
    """One graph, walked and laid out: as many backward passes through it as are wanted."""

    @torch.no_grad()
    def __init__(self, losses: Tensor, parameters: Parameters, memory: Memory) -> None:
        self._parameters, self._memory = parameters, memory
        self._graph = memory.outlines.walk(losses, parameters)
        self._take(memory.resolver.resolve(self._graph))

    def _take(self, resolved: Resolved) -> None:
        """Go by these layouts from now on."""
        self._resolved = resolved
        # Gradients of the pass that found the layouts; on a graph that is known already there was none.
        self._gradients = resolved.gradients
        self._trust = self._memory.trust_in(self._graph.outline)
        self._open = self._trust.open_in(self._graph.plan)  # what is still to be compared with plain autograd
        self._shapes = {
            use: {j: output_shape(*source) for j, source in use.operands.items()} for use in self._graph.uses
        }
        self._begun = {use: begin(use.node, self._shapes[use]) for use in self._graph.uses}

    @torch.no_grad()
    def gradients(self, retain: bool = False) -> PerExampleGradients:
        """One backward pass. Without `retain` it frees the graph."""
        graph = self._graph
        outputs, self._gradients = self._gradients or self._backward(retain or bool(self._open)), None
        found: list[Contribution] = []
        all_paths = self._memory.paths_of(graph, self._parameters)
        for use, paths in zip(graph.uses, all_paths, strict=True):
            forms = self._forms(use, {k: outputs[(use.node, k)] for k in use.outputs})
            found.extend(Contribution(forms[j], path) for j, path in paths.items())
        result = PerExampleGradients(
            len(graph.losses), join(self._parameters, found), self._memory.arithmetic, self._memory.rare
        )
        self._compare(result, outputs, all_paths)
        return result

    def _compare(
        self, result: PerExampleGradients, outputs: Mapping[Edge, Tensor], paths: list[dict[int, Path]]
    ) -> None:
        """Compare what is still open with plain autograd."""
        live: dict[Operand, Tensor] = {}
        behind: dict[Operand, tuple[str, ...]] = {}
        for use, by_operand in zip(self._graph.uses, paths, strict=True):
            for j, path in by_operand.items():
                operand = Operand(use.index, j)
                if operand in self._open:
                    live[operand] = self._live(use, {k: outputs[(use.node, k)] for k in use.outputs})
                    behind[operand] = tuple(path.parameters)

        def examine(example: int) -> selfcheck.Examined:
            arriving = self._arriving(outputs, example)
            return selfcheck.examined(result, self._graph.losses, example, self._parameters, arriving)

        if live and self._memory.rare.any(torch.stack(list(live.values()))):
            selfcheck.check(examine, live, behind, self._trust)
        self._open = []

    def _live(self, use: Use, outputs: Mapping[int, Tensor]) -> Tensor:
        """Which examples have a gradient at a use."""
        live_B = has_gradient(outputs, self._resolved.layouts[use.index])
        return live_B.to(self._graph.losses.device)

    def _backward(self, retain: bool) -> dict[Edge, Tensor]:
        edges = [(use.node, k) for use in self._graph.uses for k in use.outputs]
        # The fallback calls nodes after this pass, so they must keep what they saved.
        slow = any(
            finish is None or node_name(use.node) in self._memory.fallbacks
            for use, finish in self._begun.items()
        )
        losses, doubts = self._graph.losses, bool(self._resolved.doubts)
        found = gradients_at(self._graph, edges, torch.ones_like(losses), retain=retain or slow or doubts)
        if doubts and self._memory.rare.any(torch.stack(self._disagreements(found))):
            self._take(self._memory.resolver.probe(self._graph))
            return self._gradients or found
        return found

    def _disagreements(self, found: Mapping[Edge, Tensor]) -> list[Tensor]:
        return [
            flag
            for use in self._graph.uses
            for flag in self._resolved.disagreements(
                use.index, {k: found[(use.node, k)] for k in use.outputs}
            )
        ]

    def _arriving(self, outputs: Mapping[Edge, Tensor], example: int) -> float:
        """The largest entry of an example's gradients at all uses."""
        layouts = self._resolved.layouts
        mine = (
            layouts[use.index][k].only(outputs[(use.node, k)], example)
            for use in self._graph.uses
            for k in use.outputs
        )
        return max(float(g.abs().max()) if g.numel() else 0.0 for g in mine)

    def _forms(self, use: Use, outputs: Mapping[int, Tensor]) -> dict[int, Form]:
        layouts = self._resolved.layouts[use.index]
        device = next(iter(outputs.values())).device
        finish = self._begun[use]
        if finish is not None:
            try:
                return finish(outputs, layouts)
            except RuleDoesNotApply:
                pass
        if all(_is_nobodys(g, layouts[k]) for k, g in outputs.items()):
            return {
                j: Written.zeros(len(self._graph.losses), shape, dtype_at(*use.operands[j]), device)
                for j, shape in self._shapes[use].items()
            }
        _announce(use, self._graph, self._memory)
        return fallback.forms(use.node, self._shapes[use], outputs, layouts)


def _is_nobodys(g: Tensor, layout: Layout) -> bool:
    """No example has a gradient here: none arrives, or an expert got no rows."""
    return not bool(g.any()) or bool((layout.owners(g.device) < 0).all())


def _announce(use: Use, graph: Graph, memory: Memory) -> None:
    """Say once that an operation takes the slow way."""
    name = node_name(use.node)
    if name in memory.fallbacks:
        return
    memory.fallbacks.add(name)
    warnings.warn(
        f"{use.describe(graph.names)} has no rule: its per-example gradients come from one backward call "
        "an example, which is exact but slow. clipwise.gradients.register can add a rule.",
        FallbackWarning,
        stacklevel=2,
    )
