"""From a vector of losses to the gradient of every example: walk -> layouts -> rules or fallback -> join by parameter.

A backward pass here hands each gradient on as soon as it is complete, and lets go of it.

To ask autograd for the gradients at all uses at once would keep all of them alive until the end of the pass. Here
a hook on each use's node (of this batch's graph, and gone after the pass) sees them arrive one by one:

    g arrives -> forms of this use -> parameters that wait for no other use -> taken -> let go

A parameter with several uses is taken when the last of them has arrived: its norm needs the cross terms.

Two things cannot be done inside a hook, where autograd does not form gradients of parameters: to call a
node (the fallback does) and to carry gradients through derived tensors. Uses and parameters that need this wait
for the end of the pass. A use with no other use behind it is not run by autograd at all; its gradient is what the
pass returns.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import RLock

import torch
from torch import Tensor

from clipwise.gradients import fallback, free_memory, selfcheck
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import Form, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.memory import Memory
from clipwise.gradients.outline import Operand
from clipwise.gradients.paths import Contribution, joined, paths_in
from clipwise.gradients.resolve import Resolved
from clipwise.gradients.rules.registry import RuleDoesNotApply, begin
from clipwise.gradients.selfcheck import has_gradient
from clipwise.gradients.walk import Edge, Use, dtype_at, gradients_at, node_name, zeros_at

Take = Callable[[dict[str, Contribution]], None]
Outputs = Mapping[int, Tensor]

_MOST_SIZES = 512


class FallbackWarning(UserWarning):
    """An operation has no rule of its own: its gradients are exact, and slow."""


@dataclass
class Pass:
    """A backward pass under way."""

    take: Take
    retain: bool
    waiting: dict[str, dict[tuple[int, int], Contribution]] = field(default_factory=dict)
    late: list[tuple[Use, Outputs]] = field(default_factory=list)
    arrived: set[Use] = field(default_factory=set)
    doubts: list[Tensor] = field(default_factory=list)
    # Which examples have a gradient, at uses whose rules are still to be compared.
    untried: list[Tensor] = field(default_factory=list)
    # Each device has a thread of its own, and the arithmetic of products is one switch for all of them.
    lock: RLock = field(default_factory=RLock)


class Stream:
    """One graph, walked and laid out: as many backward passes through it as are wanted."""

    @torch.no_grad()
    def __init__(self, losses: Tensor, parameters: Parameters, memory: Memory) -> None:
        self._parameters, self._memory = parameters, memory
        self._graph = memory.outlines.walk(losses, parameters)
        self._take(memory.resolver.resolve(self._graph))

    def _take(self, resolved: Resolved) -> None:
        """Go by these layouts from now on."""
        graph, plan = self._graph, self._graph.plan
        self._resolved = resolved
        # Gradients of the pass that found the layouts; on a graph that is known already there was none.
        self._gradients = resolved.gradients
        self._open = graph.outline.trust.open_in(plan)  # what is still to be compared with plain autograd
        self._begun = {use: begin(use.node, use.shapes) for use in graph.uses}
        self._paths = dict(zip(graph.uses, paths_in(graph, self._parameters), strict=True))
        # The passes stop at uses with no other use behind them.
        self._hooked = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if above]
        self._deepest = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if not above]

    @property
    def is_probed(self) -> bool:
        """Whether the gradients are at hand already, from the pass that found the layouts."""
        return self._gradients is not None

    @property
    def is_on_cuda(self) -> bool:
        """Whether a question makes the host wait."""
        return self._graph.losses.is_cuda

    def fits(self) -> bool:
        """Whether there is memory for all gradients at once: by the operations, and the sizes at both ends."""
        known = self._graph.outline.fits
        ends = (*self._graph.uses[:1], *self._graph.uses[-1:])
        batch = len(self._graph.losses)
        sizes = batch, *(use.output_shapes[0] for use in ends)
        if sizes not in known:
            if len(known) >= _MOST_SIZES:
                known.clear()
            known[sizes] = free_memory.has_space_for(self.output_bytes(), self._parameters, batch)
        return known[sizes]

    def output_bytes(self) -> Counter[torch.device]:
        """How much the gradients at all uses take together, by device."""
        total: Counter[torch.device] = Counter()
        for use in self._graph.uses:
            metadata = use.node._input_metadata
            for k in use.outputs:
                total[metadata[k].device] += math.prod(metadata[k].shape) * metadata[k].dtype.itemsize
        return total

    def collected(self) -> PerExampleGradients:
        """All gradients in the form that their uses give, from one pass that frees the graph.

        What a form does not need (the gradients at a normalization, once its sums are there) is let go on the way.
        """
        found: dict[str, Contribution] = {}
        self.each(found.update, retain=False)
        return self._result(found)

    @torch.no_grad()
    def each(self, take: Take, retain: bool) -> None:
        """One backward pass; `take` gets the gradients of every parameter. Without `retain` it frees the graph.

        What `take` gets of a parameter for the second time replaces what it got before. While rules are still to be
        compared with plain autograd, the graph is kept.
        """
        if self.is_probed or not self._flows(Pass(take, retain or bool(self._open))):
            found = self.gradients(retain).by_parameter
            for name in list(found):
                take({name: found.pop(name)})

    @torch.no_grad()
    def gradients(self, retain: bool = False) -> PerExampleGradients:
        """All gradients from one backward pass to all uses at once, compared with plain autograd where that is due."""
        outputs, self._gradients = self._gradients or self._backward(retain or bool(self._open)), None
        now = Pass(lambda _: None, retain)
        for use in self._graph.uses:
            mine = _at(use, outputs)
            self._add(now, use, self._forms_by_rule(use, mine) or self._slow_forms(use, mine))
        result = self._result({name: self._joined(now, name) for name in self._parameters})
        self._compare(result, outputs)
        return result

    def _result(self, found: dict[str, Contribution]) -> PerExampleGradients:
        in_order = {name: found[name] for name in self._parameters}
        return PerExampleGradients(
            len(self._graph.losses), in_order, self._memory.arithmetic, self._memory.rare
        )

    def _flows(self, now: Pass) -> bool:
        """One pass. False if it has to be made again, in which case what was taken is void.

        A layout turned out to be wrong, and others are known by now; or a use got a gradient whose rule is still to be
        compared with plain autograd.
        """
        handles = [use.node.register_prehook(partial(self._arrives, now, use)) for use in self._hooked]
        try:
            last = self._backward_to(self._deepest, now.retain)
        finally:
            for handle in handles:
                handle.remove()
        for use in self._deepest:
            self._receive(now, use, {k: last.pop((use.node, k)) for k in use.outputs}, inside=False)
        for use in self._hooked:
            if use not in now.arrived:  # nothing came so far
                self._receive(now, use, {k: zeros_at(use.node, k) for k in use.outputs}, inside=False)
        if self._are_wrong(now.doubts):
            return False
        while now.late:
            use, outputs = now.late.pop()
            self._add(now, use, self._slow_forms(use, outputs))
        for name in list(now.waiting):
            now.take({name: self._joined(now, name)})
        # Else it is made again with all gradients at hand, which are compared.
        return not (now.untried and self._memory.rare.any(torch.stack(now.untried)))

    def _backward(self, retain: bool) -> dict[Edge, Tensor]:
        """The gradients at all uses."""
        uses = self._graph.uses
        found = self._backward_to(uses, retain)
        wrong = self._are_wrong([flag for use in uses for flag in self._doubts(use, _at(use, found))])
        return self._gradients or found if wrong else found

    def _backward_to(self, uses: list[Use], retain: bool) -> dict[Edge, Tensor]:
        """The fallback calls nodes after the pass, so they must keep what they saved; so must a graph with doubts."""
        edges = [(use.node, k) for use in uses for k in use.outputs]
        slow = self._memory.fallbacks
        retain = retain or bool(self._resolved.doubts) or None in self._begun.values()
        retain = retain or (bool(slow) and any(node_name(use.node) in slow for use in self._begun))
        return gradients_at(self._graph, edges, torch.ones_like(self._graph.losses), retain)

    def _doubts(self, use: Use, outputs: Outputs) -> list[Tensor]:
        """Of each layout that may be right instead of the one that is used, whether it matters here."""
        if not self._resolved.doubts:
            return []
        device = self._graph.losses.device
        return [flag.to(device) for flag in self._resolved.disagreements(use.index, outputs)]

    def _are_wrong(self, doubts: list[Tensor]) -> bool:
        """Whether a layout is in doubt after all. Then others are taken, from new probes."""
        if not doubts or not self._memory.rare.any(torch.stack(doubts)):
            return False
        self._take(self._memory.resolver.probe(self._graph))
        return True

    def _arrives(self, now: Pass, use: Use, gradients: tuple[Tensor | None, ...]) -> None:
        """The hook: gradients have come to a node's outputs, and the node is about to run."""
        outputs: dict[int, Tensor] = {}
        with now.lock, torch.no_grad():
            for k in use.outputs:
                g = gradients[k]
                outputs[k] = zeros_at(use.node, k) if g is None else g
            self._receive(now, use, outputs, inside=True)

    def _receive(self, now: Pass, use: Use, outputs: Outputs, inside: bool) -> None:
        now.arrived.add(use)
        now.doubts.extend(self._doubts(use, outputs))
        if any(operand.use == use.index for operand in self._open):
            now.untried.append(self._live(use, outputs))
        forms = self._forms_by_rule(use, outputs)
        if forms is None:
            now.late.append((use, outputs))
            return
        if not now.retain:
            self._begun[use] = None  # it holds what the node saved, which the pass is about to free
        complete = self._add(now, use, forms)
        ready = [name for name in complete if not inside or name in self._graph.plan.at_once]
        if ready:
            now.take({name: self._joined(now, name) for name in ready})

    def _forms_by_rule(self, use: Use, outputs: Outputs) -> dict[int, Form] | None:
        finish = self._begun[use]
        if finish is None:
            return None
        try:
            return finish(outputs, self._resolved.layouts[use.index])
        except RuleDoesNotApply:
            return None

    def _slow_forms(self, use: Use, outputs: Outputs) -> dict[int, Form]:
        """Of an operation without a rule."""
        layouts, batch = self._resolved.layouts[use.index], len(self._graph.losses)
        if all(_is_nobodys(g, layouts[k]) for k, g in outputs.items()):
            device = next(iter(outputs.values())).device
            return {
                j: Written.zeros(batch, shape, dtype_at(*use.operands[j]), device)
                for j, shape in use.shapes.items()
            }
        name = node_name(use.node)
        if name not in self._memory.fallbacks:
            self._memory.fallbacks.add(name)
            warnings.warn(
                f"{use.describe(self._graph.names)} has no rule: its per-example gradients come from one backward call "
                "an example, which is exact but slow. clipwise.gradients.register can add a rule.",
                FallbackWarning,
                stacklevel=2,
            )
        return fallback.forms(use.node, use.shapes, outputs, layouts)

    def _add(self, now: Pass, use: Use, forms: Mapping[int, Form]) -> list[str]:
        """Put a use's gradients to those of other uses; the parameters that are complete now."""
        complete = []
        uses_of = self._graph.plan.uses_of
        for j, path in self._paths[use].items():
            for name in path.parameters:
                found = now.waiting.setdefault(name, {})
                found[(use.index, j)] = Contribution(forms[j], path)
                if len(found) == uses_of[name]:
                    complete.append(name)
        return complete

    def _joined(self, now: Pass, name: str) -> Contribution:
        """One contribution from all uses, in an order that does not depend on which came first."""
        found = now.waiting.pop(name)
        uses = [found[key] for key in sorted(found)]
        if len(uses) == 1 and uses[0].path.isometric:
            return uses[0]
        return joined(name, self._parameters[name], uses)

    def _live(self, use: Use, outputs: Outputs) -> Tensor:
        """Which examples have a gradient at a use."""
        live_B = has_gradient(outputs, self._resolved.layouts[use.index])
        return live_B.to(self._graph.losses.device)

    def _compare(self, result: PerExampleGradients, outputs: Mapping[Edge, Tensor]) -> None:
        """Compare what is still open with plain autograd."""
        live: dict[Operand, Tensor] = {}
        behind: dict[Operand, tuple[str, ...]] = {}
        for use, paths in self._paths.items():
            for j, path in paths.items():
                operand = Operand(use.index, j)
                if operand in self._open:
                    live[operand] = self._live(use, _at(use, outputs))
                    behind[operand] = tuple(path.parameters)

        def examine(example: int) -> selfcheck.Examined:
            arriving = self._arriving(outputs, example)
            return selfcheck.examined(result, self._graph.losses, example, self._parameters, arriving)

        if live and self._memory.rare.any(torch.stack(list(live.values()))):
            selfcheck.check(examine, live, behind, self._graph.outline.trust)
        self._open = []

    def _arriving(self, outputs: Mapping[Edge, Tensor], example: int) -> float:
        """The largest entry of an example's gradients at all uses."""
        layouts = self._resolved.layouts
        mine = (
            layouts[use.index][k].only(outputs[(use.node, k)], example)
            for use in self._graph.uses
            for k in use.outputs
        )
        return max(float(g.abs().max()) if g.numel() else 0.0 for g in mine)


def _at(use: Use, found: Mapping[Edge, Tensor]) -> dict[int, Tensor]:
    """The gradients at the outputs of one use."""
    return {k: found[(use.node, k)] for k in use.outputs}


def _is_nobodys(g: Tensor, layout: Layout) -> bool:
    """No example has a gradient here: none arrives, or an expert got no rows."""
    return not bool(g.any()) or bool((layout.owners(g.device) < 0).all())
