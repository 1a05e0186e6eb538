"""A backward pass that hands each gradient on as soon as it is complete, and lets go of it.

To ask autograd for the gradients at all uses at once would keep all of them alive until the end of the pass. Here
a hook on each use's node (of this batch's graph, and gone after the pass) sees them arrive one by one:

    g arrives -> forms of this use -> parameters that wait for no other use -> taken -> let go

A parameter with several uses is taken when the last of them has arrived: its norm needs the cross terms.

Two things cannot be done inside a hook, where autograd is told not to form gradients of parameters: to call a
node (the fallback does) and to carry gradients through derived tensors. Uses and parameters that need this wait
for the end of the pass. A use with no other use behind it is not run by autograd at all; its gradient is what the
pass returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import RLock

import torch
from torch import Tensor

from clipwise.gradients.bookkeeping import Book, Memory
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import Form
from clipwise.gradients.join import Contribution, joined
from clipwise.gradients.resolve import Resolved
from clipwise.gradients.rules import RuleDoesNotApply
from clipwise.gradients.walk import Use, gradients_at, node_name, output_shape, zeros_at

Take = Callable[[dict[str, Contribution]], None]
Outputs = Mapping[int, Tensor]


@dataclass
class Pass:
    """A backward pass under way."""

    take: Take
    retain: bool
    waiting: dict[str, dict[tuple[int, int], Contribution]] = field(default_factory=dict)
    late: list[tuple[Use, Outputs]] = field(default_factory=list)
    arrived: set[Use] = field(default_factory=set)
    doubts: list[Tensor] = field(default_factory=list)
    untried: list[Tensor] = field(
        default_factory=list
    )  # gradients at uses whose rules are still to be compared
    # Each device has a thread of its own, and the arithmetic of products is one switch for all of them.
    lock: RLock = field(default_factory=RLock)


class Stream(Book):
    """A book whose passes keep no gradients."""

    @property
    def is_probed(self) -> bool:
        """Whether the gradients are at hand already, from the pass that found the layouts."""
        return self._gradients is not None

    @property
    def is_on_cuda(self) -> bool:
        """Whether a question makes the host wait."""
        return self._graph.losses.is_cuda

    @property
    def kind(self) -> tuple[object, ...]:
        """What the size of a pass depends on: the operations, and the sizes at both ends."""
        ends = (*self._graph.uses[:1], *self._graph.uses[-1:])
        return self._graph.outline, *(output_shape(use.node, use.outputs[0]) for use in ends)

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
        in_order = {name: found[name] for name in self._parameters}
        return PerExampleGradients(
            len(self._graph.losses), in_order, self._memory.arithmetic, self._memory.rare
        )

    @torch.no_grad()
    def each(self, take: Take, retain: bool) -> None:
        """One backward pass, in which `take` gets the gradients of every parameter; it frees the graph if told to.

        What `take` gets of a parameter for the second time stands for what it got before. While rules are still to be
        compared with plain autograd, the graph is kept.
        """
        if self.is_probed or not self._flows(Pass(take, retain or bool(self._open))):
            found = self.gradients(retain).by_parameter
            for name in list(found):
                take({name: found.pop(name)})

    def _take(self, resolved: Resolved) -> None:
        super()._take(resolved)
        graph, plan = self._graph, self._graph.plan
        self._paths = dict(zip(graph.uses, self._memory.paths_of(graph, self._parameters), strict=True))
        self._hooked = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if above]
        # Uses with no other use behind them.
        self._deepest = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if not above]

    def _flows(self, now: Pass) -> bool:
        """One pass. False if it has to be made again, in which case what was taken is void.

        A layout turned out to be wrong, and others are known by now; or a use got a gradient whose rule is still to be
        compared with plain autograd.
        """
        edges = [(use.node, k) for use in self._deepest for k in use.outputs]
        handles = [use.node.register_prehook(partial(self._arrives, now, use)) for use in self._hooked]
        try:
            retain = now.retain or bool(self._resolved.doubts) or self._has_slow_uses()
            last = gradients_at(self._graph, edges, torch.ones_like(self._graph.losses), retain)
        finally:
            for handle in handles:
                handle.remove()
        for use in self._deepest:
            self._receive(now, use, {k: last.pop((use.node, k)) for k in use.outputs}, inside=False)
        for use in self._hooked:
            if use not in now.arrived:  # nothing came so far
                self._receive(now, use, {k: zeros_at(use.node, k) for k in use.outputs}, inside=False)
        if now.doubts and self._memory.rare.any(torch.stack(now.doubts)):
            self._take(self._memory.resolver.probe(self._graph))
            return False
        while now.late:
            use, outputs = now.late.pop()
            self._add(now, use, self._forms(use, outputs))
        for name in list(now.waiting):
            now.take({name: self._joined(now, name)})
        # Else it is made again with all gradients at hand, which are compared.
        return not (now.untried and self._memory.rare.any(torch.stack(now.untried)))

    def _has_slow_uses(self) -> bool:
        """The fallback calls nodes after the pass, so they must keep what they saved."""
        return any(
            finish is None or node_name(use.node) in self._memory.fallbacks
            for use, finish in self._begun.items()
        )

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
        self._note_doubts(now, use, outputs)
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
        return joined(name, self._parameters[name], [found[key] for key in sorted(found)])

    def _note_doubts(self, now: Pass, use: Use, outputs: Outputs) -> None:
        device = self._graph.losses.device
        now.doubts.extend(flag.to(device) for flag in self._resolved.disagreements(use.index, outputs))


def by_bookkeeping(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass, whose output gradients are kept for norms and sums. It frees the graph."""
    return Stream(losses, parameters, memory).collected()
