"""Detect losses that depend on the inputs of other examples, from input gradients.

d loss_i / d input_j must be 0 for i != j; gradients/layout.py explains how one extra backward pass shows it. A gradient
of exactly 0 shows nothing: a head or gate that is still 0 hides any coupling behind it. So a place in the graph counts
as examined once a gradient has arrived there. The probe runs before the release:

    - on the first batches, and on the first batches of any graph with new operations;
    - on a batch in which a place without gradients so far gets one.

To reach the inputs, autograd must record frozen layers too, and keep their activations. So once every place is
examined, a model whose batch goes through frozen layers first is recorded from its first trained layer on. If such a
graph has new operations, the probe runs on the batch that follows.

This is a lint, not a proof. It covers floating-point inputs (marked.py) and, for ids, outputs of trainable embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.layout import LARGEST_WEIGHT, Probe, probe_weights, surviving
from clipwise.gradients.outline import require_not_rerun
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Node
from clipwise.layers.batch_statistics import observations
from clipwise.layers.clipped import unclipped
from clipwise.sampling.generators import private_generator
from clipwise.validation.marked import MarkedTensor, Trace, plain
from clipwise.validation.shared_factors import SHARED, SharedFactors

_PROBED_BATCHES = 2
_MOST_WIRINGS = 512
_FRUITLESS = 64  # batches without a new finding; afterwards only every `_SOME`-th is examined
_SOME = 16
USE_BATCH = (
    "Batch(max_norm=...) clips whole microbatches instead, within which examples may depend on one another; it needs "
    "far more noise"
)
PAIRS = (
    "losses are made of one entry for each pair of examples: outputs of shape (B, 1) were broadcast against targets "
    "of shape (B,), or vice versa, so each loss depends on the targets of all examples. Give both the same shape: "
    "outputs.squeeze(1), or targets.unsqueeze(1)."
)
_COUPLED = (
    "The loss of one example depends on the inputs of another, so clipping single examples bounds nothing. Usual "
    "causes: batch statistics, subtracting a mean over the batch, a loss that compares examples or is divided by a "
    "quantity of the whole batch. clipwise.check(model, loss, batch) helps to find the layer. If the coupling is "
    f"intended, {USE_BATCH}."
)
_COUPLED_ROWS = (
    "An input row of a layer of clipwise.layers.with_released_statistics depends on the inputs of another example, so "
    "clipping single rows does not bound its statistics. Usual causes: batch statistics in an earlier layer, or rows "
    f"in another order than the examples. If the coupling is intended, {USE_BATCH}."
)

Pattern = tuple[str, tuple[str, ...]]  # an operation and those that feed it
Place = tuple[Pattern, int]  # the n-th operation of that pattern, counted from the losses


class IndependenceProbe:
    """Raises if losses depend on other examples' inputs, on the first batches and on new parts of the graph.

    Attributes:
        reaches_batch: False if a graph did not lead to the batch, as behind `detach()`. There is nothing to probe then.
    """

    def __init__(self) -> None:
        self.reaches_batch = True
        self._left, self._fruitless = _PROBED_BATCHES, 0
        self._factors, self._trace = SharedFactors(), Trace()
        self._known: set[Pattern] = set()
        self._wirings: dict[int, list[Place]] = {}
        self._live: set[Place] = set()  # where a gradient arrived, in a probe that found nothing
        self._dead: set[Place] = set()  # where none has so far

    @property
    def is_settled(self) -> bool:
        """Whether every place of the graphs so far was examined."""
        return self._left == 0 and not self._dead

    def mark(self, batch: Any) -> Any:
        """Return the batch with marked tensors."""
        self._trace = Trace(is_recorded=not (self.is_settled and self._trace.has_frozen))
        return self._trace.mark(batch)

    def examine(self, losses: Tensor) -> bool:
        """Raise if losses depend on other examples' inputs, or on a number of the whole batch.

        Returns whether `reaches_batch` has changed.
        """
        before = self.reaches_batch
        if len(losses) > 1 and losses.grad_fn is not None:
            self._examine(losses)
        return self.reaches_batch != before

    def _examine(self, losses: Tensor) -> None:
        trace = self._trace
        with torch._C.DisableTorchFunctionSubclass():
            nodes, names = _behind(losses)
            if not set(trace.pairs).isdisjoint(nodes):
                raise CoupledExamplesError(PAIRS)
            if not set(trace.shared).isdisjoint(nodes):
                raise CoupledExamplesError(SHARED)
            has_woken = self._factors.examine(losses, trace.others)
            lookups = [node for node, name in zip(nodes, names, strict=True) if "Embedding" in name]
            inputs = [*trace.inputs, *_lookups(lookups, trace.others)]
            if trace.is_recorded and not (_has_ids(lookups) or any(edge.node in nodes for edge in inputs)):
                self.reaches_batch = False
            if not inputs and trace.is_recorded:
                self._left = 0  # nothing to examine until the graph has new operations
                return
            places = self._places(nodes, names)
            if not trace.is_recorded:
                return
            if self._is_due(has_woken) and (self._left or self._has_awoken(losses, nodes, places)):
                self._probe(losses, inputs, len(trace.inputs), dict(zip(nodes, places, strict=True)))

    def _places(self, nodes: list[Node], names: list[str]) -> list[Place]:
        """Return the place of each node. New operations restart the probe."""
        wiring = hash(tuple(names))
        if wiring in self._wirings:
            return self._wirings[wiring]
        require_not_rerun(*names)
        if len(self._wirings) >= _MOST_WIRINGS:
            self._wirings.clear()
        seen: Counter[Pattern] = Counter()
        places: list[Place] = []
        for node, name in zip(nodes, names, strict=True):
            pattern = name, tuple("" if child is None else child.name() for child, _ in node.next_functions)
            places.append((pattern, seen[pattern]))
            seen[pattern] += 1
        if not seen.keys() <= self._known:
            self._known |= seen.keys()
            self._left, self._fruitless = _PROBED_BATCHES, 0
        self._wirings[wiring] = places
        return places

    def _is_due(self, has_woken: bool) -> bool:
        """Whether to probe now. A place that never gets a gradient must not cost a backward pass in every step."""
        if self.is_settled:
            return False
        self._fruitless += 1
        return has_woken or self._fruitless <= _FRUITLESS or self._fruitless % _SOME == 0

    def _has_awoken(self, losses: Tensor, nodes: list[Node], places: list[Place]) -> bool:
        """Whether a gradient arrives at a place that had none. Runs a backward pass up to the first such places."""
        dead = {node for node, place in zip(nodes, places, strict=True) if place in self._dead}
        alive = (node for node in nodes if node not in dead)
        first = {edge for node in alive for edge in node.next_functions if edge[0] in dead}
        if not first:
            return False
        edges = [GradientEdge(*edge) for edge in first]
        weights_B = probe_weights(len(losses), losses)
        with ieee_arithmetic(), unclipped():
            found = torch.autograd.grad(losses, edges, weights_B, retain_graph=True, allow_unused=True)
        return any(_is_live(g) for g in found if g is not None)

    def _probe(self, losses: Tensor, inputs: list[GradientEdge], marked: int, places: dict[Node, Place]) -> None:
        """Run backward passes to the inputs. The first `marked` are the loader's tensors, with examples on axis 0."""
        weights_B = probe_weights(len(losses), losses)
        arrived: dict[Place, list[Tensor]] = {}
        with ExitStack() as hooks:
            for node, place in places.items():
                hooks.callback(node.register_prehook(partial(_note, arrived, place)).remove)
            is_proof = _require_apart(losses, torch.ones_like(losses), inputs, marked, weights_B, _COUPLED)
        for seen, output in observations(losses):  # the statistics of a row may depend on its own example only
            if seen.shape[0] == len(losses):
                random = torch.randn(seen.shape, generator=private_generator())
                random = random.to(seen.mean_BC.device, seen.dtype)
                is_proof &= _require_apart(output, random, inputs, marked, weights_B, _COUPLED_ROWS)
        if not is_proof:
            return
        self._fruitless, self._left = 0, max(0, self._left - 1)
        self._live |= {place for place, flags in arrived.items() if any(map(bool, flags))}
        self._dead = (self._dead | arrived.keys()) - self._live


def _require_apart(
    outputs: Tensor | GradientEdge,
    plain_sum: Tensor,
    inputs: list[GradientEdge],
    marked: int,
    weights_B: Tensor,
    refusal: str,
) -> bool:
    """Raise if outputs, with one row per example, depend on other examples' inputs.

    `plain_sum` holds the outputs' factors in the unweighted sum. Returns whether the result is conclusive: a NaN can
    hide coupling, and a gradient of 0 shows nothing.
    """

    def gradients(given: Tensor) -> tuple[Tensor | None, ...]:
        with ieee_arithmetic(), unclipped():
            return torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)

    # Coupling of two examples shows where the other one has the larger weight: in one of these two passes.
    both, one_a_row = (weights_B, LARGEST_WEIGHT / weights_B), [1] * (plain_sum.dim() - 1)
    found = gradients(plain_sum)
    weighted = [gradients(plain_sum * w_B.to(plain_sum).view(-1, *one_a_row)) for w_B in both]
    thrice: tuple[Tensor | None, ...] = ()
    is_finite, is_live = True, False
    for number, p in enumerate(found):
        ws = [w for w in (each[number] for each in weighted) if w is not None]
        if p is None or len(ws) < len(both):
            continue
        probes = [Probe(p, each, w_B.to(p.device)) for each, w_B in zip(ws, both, strict=True)]
        layouts = surviving(probes)
        if not layouts and not probes[0].repeats:  # it may be rounding
            thrice = thrice or gradients(3 * plain_sum)
            layouts = surviving([replace(probe, thrice=thrice[number]) for probe in probes])
        if number < marked and len(p) == len(weights_B):
            # In the loader's tensors, examples are on axis 0: one loss per position is not one per example.
            layouts = [layout for layout in layouts if layout.axis == 0]
            p_Bn, w_Bn = (t.reshape(len(t), t[0].numel()) for t in (p, ws[0]))
            finite_B, live_B = torch.isfinite(p_Bn).all(1), w_Bn.any(1)
            is_live |= int((finite_B & live_B).sum()) > 1
            is_finite &= int(finite_B.sum()) > 1
        else:
            is_live |= _is_live(ws[0])
            is_finite &= bool(torch.isfinite(p).all())
        # Where the plain sum is 0 the weighted one must be too: the sum of (l_i - mean l) is 0 for any input.
        if not layouts and any(bool(each.any()) for each in ws):
            raise CoupledExamplesError(refusal)
    return is_finite and is_live


def _behind(losses: Tensor) -> tuple[list[Node], list[str]]:
    """All nodes of the losses' graph, the last operation first, and their names."""
    root: Node = losses.grad_fn
    nodes, names, entered = [root], [], {None, root}
    for node in nodes:  # the list grows in the loop
        name = node.name()
        names.append(name)
        for child, _ in node.next_functions:
            if child not in entered:
                entered.add(child)
                nodes.append(child)
    return nodes, names


def _has_ids(lookups: Iterable[Node]) -> bool:
    """Whether an embedding has ids that were computed from the batch. It reads no values: the statement shows it."""
    return any(isinstance(getattr(node, "_saved_indices", None), MarkedTensor) for node in lookups)


def _lookups(nodes: Iterable[Node], ids: list[Tensor]) -> list[GradientEdge]:
    """The outputs of embeddings of these ids, as edges of the losses' graph."""
    if not ids:
        return []

    def is_of_batch(saved: Tensor, given: Tensor) -> bool:
        """Whether the saved ids are a view of the batch's ids, or a copy on another device or in another dtype."""
        if saved.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            return True
        return saved.shape == given.shape and torch.equal(saved, given.to(saved))

    saved = ((node, getattr(node, "_saved_indices", None)) for node in nodes)
    return [
        GradientEdge(node, 0)
        for node, indices in saved
        if isinstance(indices, Tensor) and any(is_of_batch(plain(indices), plain(x)) for x in ids)
    ]


def _note(arrived: dict[Place, list[Tensor]], place: Place, gradients: tuple[Tensor | None, ...]) -> None:
    """Record on the device whether a gradient arrives at a node. (Reading it here would synchronise.)"""
    arrived.setdefault(place, []).extend(
        torch.ones((), dtype=torch.bool) if g.is_sparse else g.any() for g in gradients if g is not None
    )


def _is_live(gradient: Tensor) -> bool:
    return gradient.is_sparse or bool(gradient.any())
