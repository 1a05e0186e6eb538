"""From losses to per-example gradients: walk -> layouts -> rules or fallback -> join per parameter.

Requesting the gradients at all uses at once would keep all of them alive until the end of the backward pass. Instead, a
hook on the node of each use receives its gradient as soon as it is complete (hooks are removed after the pass):

    g arrives -> forms of this use -> parameters without further uses -> `take` -> freed

A parameter with several uses is taken after its last use, because its norm needs the cross terms.

Two operations cannot run inside a hook: calling a node (the fallback) and carrying gradients through derived tensors.
Uses and parameters that need them wait for the end of the pass. Autograd does not run a use with no other use behind
it; the pass returns the gradient of such a use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import RLock

import torch
from torch import Tensor

from clipwise.errors import warn
from clipwise.gradients import fallback, free_memory, selfcheck
from clipwise.gradients.examples import Contribution, Parameters, Path, PerExampleGradients, joined, paths_in
from clipwise.gradients.forms import Form, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.outline import Operand
from clipwise.gradients.precision import IEEE, Arithmetic, Rare
from clipwise.gradients.resolve import Resolved, Resolver
from clipwise.gradients.rules.registry import RuleDoesNotApply, begin
from clipwise.gradients.selfcheck import has_gradient
from clipwise.gradients.walk import Edge, Outlines, Use, dtype_at, gradients_at, node_name, zeros_at

Take = Callable[[dict[str, Contribution]], None]
Outputs = Mapping[int, Tensor]

_MOST_SIZES = 512
_FIRST = (0,)


class FallbackWarning(UserWarning):
    """An operation has no rule. Its per-example gradients are exact but slow."""


@dataclass
class Memory:
    """What a run keeps between batches: its arithmetic, and known outlines and layouts."""

    arithmetic: Arithmetic = IEEE
    rare: Rare = field(default_factory=Rare)
    outlines: Outlines = field(default_factory=Outlines)
    resolver: Resolver = field(default_factory=Resolver)
    fallbacks: set[str] = field(default_factory=set)  # operations without a rule seen so far


@dataclass
class Pass:
    """The state of one backward pass."""

    take: Take
    retain: bool
    waiting: dict[str, dict[tuple[int, int], Contribution]] = field(default_factory=dict)
    late: list[tuple[Use, Outputs]] = field(default_factory=list)
    arrived: set[Use] = field(default_factory=set)
    doubts: list[Tensor] = field(default_factory=list)
    # Examples with a gradient, at uses with rules that are not yet checked against plain autograd.
    untried: list[Tensor] = field(default_factory=list)
    # Each device has its own autograd thread, and the precision of products is a global switch.
    lock: RLock = field(default_factory=RLock)


class Stream:
    """One walked graph with its layouts. Supports any number of backward passes."""

    @torch.no_grad()
    def __init__(self, losses: Tensor, parameters: Parameters, memory: Memory) -> None:
        self._parameters, self._memory = parameters, memory
        self._graph = memory.outlines.walk(losses, parameters)
        self._take(memory.resolver.resolve(self._graph))

    def _take(self, resolved: Resolved) -> None:
        graph, plan, trust = self._graph, self._graph.plan, self._graph.outline.trust
        self._resolved = resolved
        # From the pass that found the layouts; None for a graph that was known already.
        self._gradients = resolved.gradients
        self._open = [] if trust.settled is plan else trust.open_in(plan)  # not yet compared with plain autograd
        self._begun = dict(zip(graph.uses, begin(*((use.node, use.shapes) for use in graph.uses)), strict=True))
        self._paths = dict(zip(graph.uses, self._paths_of_uses(), strict=True))
        # A backward pass stops at uses with no other use behind them.
        self._hooked = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if above]
        self._deepest = [use for use, above in zip(graph.uses, plan.has_use_behind, strict=True) if not above]

    def _paths_of_uses(self) -> list[dict[int, Path]]:
        """For each use, the paths of its operands. Paths without autograd are the same for every graph of a plan."""
        plan = self._graph.plan
        if plan.paths is None or plan.paths[0] is not self._parameters:
            found = paths_in(self._graph, self._parameters)
            if not all(way.is_by_hand for ways in plan.routes for way in ways.values()):
                return found
            plan.paths = self._parameters, found
        return plan.paths[1]

    @property
    def is_probed(self) -> bool:
        """Whether the pass that found the layouts already computed the gradients."""
        return self._gradients is not None

    @property
    def is_on_cuda(self) -> bool:
        """Whether reading a value from the device makes the host wait."""
        return self._graph.losses.is_cuda

    def fits(self) -> bool:
        """Whether memory allows all gradients at once. Decided once per graph and sizes; a smaller batch fits too."""
        known, uses, batch = self._graph.outline.fits, self._graph.uses, len(self._graph.losses)
        sizes = tuple(use.output_shapes[0].numel() // batch for use in (*uses[:1], *uses[-1:]))
        most, least = known.get(sizes, (0, math.inf))
        if most < batch < least:
            if len(known) >= _MOST_SIZES:
                known.clear()
            fits = free_memory.has_space_for(self.output_bytes(), self._parameters, batch)
            known[sizes] = most, least = (batch, least) if fits else (most, batch)
        return batch <= most

    def output_bytes(self) -> Counter[torch.device]:
        """The size of the gradients at all uses, per device."""
        total: Counter[torch.device] = Counter()
        for use in self._graph.uses:
            metadata = use.node._input_metadata
            for k in use.outputs:
                total[metadata[k].device] += math.prod(metadata[k].shape) * metadata[k].dtype.itemsize
        return total

    def collected_if_possible(self) -> PerExampleGradients | None:
        """`collected`, if memory allows it."""
        return self.collected() if self.is_probed or self.fits() else None

    def collected(self) -> PerExampleGradients:
        """All gradients as forms, from one pass that frees the graph.

        Tensors no longer needed by a form (a normalization's output gradient after its sums) are freed during the pass.
        """
        found: dict[str, Contribution] = {}
        self.each(found.update, retain=False)
        return self._result(found)

    @torch.no_grad()
    def each(self, take: Take, retain: bool) -> None:
        """One backward pass; `take` receives the gradients of every parameter. Frees the graph unless `retain`.

        A second call of `take` for a parameter replaces the first. The graph is kept while rules are unchecked.
        """
        if self.is_probed or not self._flows(Pass(take, retain or bool(self._open))):
            found = self.gradients(retain).by_parameter
            for name in list(found):
                take({name: found.pop(name)})

    @torch.no_grad()
    def gradients(self, retain: bool = False) -> PerExampleGradients:
        """All gradients from one backward pass to all uses, compared with plain autograd where not yet done."""
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
        return PerExampleGradients(len(self._graph.losses), in_order, self._memory.arithmetic, self._memory.rare)

    def _flows(self, now: Pass) -> bool:
        """One pass. False if it has to be repeated, and its results discarded.

        Either a layout was wrong and has been replaced, or a gradient arrived at a use with an unchecked rule.
        """
        handles = [use.node.register_prehook(partial(self._arrives, now, use)) for use in self._hooked]
        try:
            with self._watching_silent(now.doubts):
                last = self._backward_to(self._deepest, now.retain)
        finally:
            for handle in handles:
                handle.remove()
        for use in self._deepest:
            self._receive(now, use, {k: last.pop((use.node, k)) for k in use.outputs}, inside=False)
        for use in self._hooked:
            if use not in now.arrived:  # no gradient arrived
                self._receive(now, use, {k: zeros_at(use.node, k) for k in use.outputs}, inside=False)
        if self._are_wrong(now.doubts):
            return False
        while now.late:
            use, outputs = now.late.pop()
            self._add(now, use, self._slow_forms(use, outputs))
        for name in list(now.waiting):
            now.take({name: self._joined(now, name)})
        # Otherwise the pass is repeated with all gradients in memory, and compared.
        return not (now.untried and self._memory.rare.any(torch.stack(now.untried)))

    def _backward(self, retain: bool) -> dict[Edge, Tensor]:
        uses, doubts = self._graph.uses, list[Tensor]()
        with self._watching_silent(doubts):
            found = self._backward_to(uses, retain)
        wrong = self._are_wrong([*doubts, *(flag for use in uses for flag in self._doubts(use, _at(use, found)))])
        return self._gradients or found if wrong else found

    def _backward_to(self, uses: list[Use], retain: bool) -> dict[Edge, Tensor]:
        """Keep saved tensors if the fallback calls nodes after the pass, or if layouts are in doubt."""
        edges = [(use.node, k) for use in uses for k in use.outputs]
        slow = self._memory.fallbacks
        retain = retain or bool(self._resolved.doubts or self._resolved.silent) or None in self._begun.values()
        retain = retain or (bool(slow) and any(node_name(use.node) in slow for use in self._begun))
        return gradients_at(self._graph, edges, torch.ones_like(self._graph.losses), retain)

    @contextmanager
    def _watching_silent(self, doubts: list[Tensor]) -> Iterator[None]:
        """During a pass, note whether a gradient arrives where the layout is unknown."""

        def arrives(k: int, gradients: tuple[Tensor | None, ...]) -> None:
            if (g := gradients[k]) is not None:
                doubts.append(g.detach().ne(0).any().to(self._graph.losses.device))

        order = self._graph.order
        handles = [order[index].register_prehook(partial(arrives, k)) for index, k in self._resolved.silent]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _doubts(self, use: Use, outputs: Outputs) -> list[Tensor]:
        """For each alternative layout, whether it gives a different result on this batch."""
        if not self._resolved.doubts:
            return []
        device = self._graph.losses.device
        return [flag.to(device) for flag in self._resolved.disagreements(use.index, outputs)]

    def _are_wrong(self, doubts: list[Tensor]) -> bool:
        """Whether a layout is ambiguous on this batch. If so, new probes choose the layouts."""
        if not doubts or not self._memory.rare.any(torch.stack(doubts)):
            return False
        self._take(self._memory.resolver.probe(self._graph))
        return True

    def _arrives(self, now: Pass, use: Use, gradients: tuple[Tensor | None, ...]) -> None:
        """The hook: gradients have arrived at a node's outputs, and the node is about to run."""
        outputs: dict[int, Tensor] = {}
        with now.lock, torch.no_grad():
            for k in use.outputs:
                g = gradients[k]
                outputs[k] = zeros_at(use.node, k) if g is None else g
            self._receive(now, use, outputs, inside=True)

    def _receive(self, now: Pass, use: Use, outputs: Outputs, inside: bool) -> None:
        now.arrived.add(use)
        if self._resolved.doubts:
            now.doubts.extend(self._doubts(use, outputs))
        if self._open and any(operand.use == use.index for operand in self._open):
            now.untried.append(self._live(use, outputs))
        forms = self._forms_by_rule(use, outputs)
        if forms is None:
            now.late.append((use, outputs))
            return
        if not now.retain:
            self._begun[use] = None  # it holds the saved tensors that the pass is about to free
        complete = self._add(now, use, forms)
        ready = [name for name in complete if not inside or name in self._graph.plan.at_once]
        if ready:
            now.take({name: self._joined(now, name) for name in ready})

    def _forms_by_rule(self, use: Use, outputs: Outputs) -> dict[int, Form] | None:
        begun, layouts = self._begun[use], self._resolved.layouts[use.index]
        if begun is None:
            return None
        try:
            if not begun.for_all and use.outputs == _FIRST and not outputs[0].is_complex():  # nearly always
                found: dict[int, Form] = begun.finish(outputs[0], layouts[0])
                return found
            return begun(outputs, layouts)
        except RuleDoesNotApply:
            return None

    def _slow_forms(self, use: Use, outputs: Outputs) -> dict[int, Form]:
        layouts, batch = self._resolved.layouts[use.index], len(self._graph.losses)
        if all(_is_unreached(g, layouts[k]) for k, g in outputs.items()):
            device = next(iter(outputs.values())).device
            return {
                j: Written.zeros(batch, shape, dtype_at(*use.operands[j]), device) for j, shape in use.shapes.items()
            }
        name = node_name(use.node)
        if name not in self._memory.fallbacks:
            self._memory.fallbacks.add(name)
            warn(
                f"{use.describe(self._graph.names)} has no rule: its per-example gradients come from one backward call "
                "per example, which is exact but slow. clipwise.gradients.register can add a rule.",
                FallbackWarning,
            )
        return fallback.forms(use.node, use.shapes, outputs, layouts)

    def _add(self, now: Pass, use: Use, forms: Mapping[int, Form]) -> list[str]:
        """Add the gradients of a use. Returns the parameters that are complete now."""
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
        """One contribution from all uses, in an order that does not depend on their arrival."""
        found = now.waiting.pop(name)
        uses = [found[key] for key in sorted(found)]
        if len(uses) == 1 and uses[0].path.isometric:
            return uses[0]
        return joined(name, self._parameters[name], uses)

    def _live(self, use: Use, outputs: Outputs) -> Tensor:
        live_B = has_gradient(outputs, self._resolved.layouts[use.index])
        return live_B.to(self._graph.losses.device)

    def _compare(self, result: PerExampleGradients, outputs: Mapping[Edge, Tensor]) -> None:
        """Compare the operands that are not yet trusted with plain autograd."""
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
            layouts[use.index][k].only(outputs[(use.node, k)], example) for use in self._graph.uses for k in use.outputs
        )
        return max(float(g.abs().max()) if g.numel() else 0.0 for g in mine)


def _at(use: Use, found: Mapping[Edge, Tensor]) -> dict[int, Tensor]:
    """The gradients at the outputs of one use."""
    return {k: found[(use.node, k)] for k in use.outputs}


def _is_unreached(g: Tensor, layout: Layout) -> bool:
    """Whether no example has a gradient here: none arrives, or an expert got no rows."""
    return not bool(g.any()) or bool((layout.owners(g.device) < 0).all())
