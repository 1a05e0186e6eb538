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

`SharedFactors` detects losses that are all scaled by one number of the batch.

    sum_i clip(g_i / n),    n = the realised batch size, the number of valid tokens, the sum of class weights

The contribution of an unclipped example depends on n, so one record moves the contributions of all others: by up to
(number of examples) x C. n is computed from integers, so no gradient shows it. The saved factors in the graph do: those
of linear operations at the end of the losses' graph are read. This is a lint as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.layout import LARGEST_WEIGHT, Probe, probe_weights, surviving
from clipwise.gradients.outline import named, require_not_rerun
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Node
from clipwise.layers.batch_statistics import observations
from clipwise.layers.clipped import unclipped
from clipwise.sampling.generators import private_generator
from clipwise.validation.marked import MarkedTensor, Trace, plain

_SCALES = named("Div", "Mul")
# Operations through which the losses stay a sum of terms times factors.
_LINEAR = _SCALES | named(
    *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Where", "MaskedFill", "Cat", "Stack", "Clone", "ToCopy"),
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Expand", "Permute"),
    *("Transpose", "T", "Slice", "Select", "Index", "IndexPut", "IndexAdd", "ScatterAdd", "MaskedSelect"),
    "MaskedScatter",
)
_NEAR = 1e-5  # relative: 1 / n may be rounded in float32
_IGNORED = (-100, -1, 0)  # the usual labels of ignored positions
_SIZE = (
    "losses are divided by the number of examples in the batch, which is random and secret: with one record more or "
    "less the losses of all others would change. Remove the division: private.step already divides by a constant."
)
_SHARED = (
    "losses are multiplied or divided by a number that is computed from the whole batch, such as its number of valid "
    "tokens or the sum of its class weights. One record changes that number, and with it the gradients of all others, "
    "so clipping single examples bounds nothing. Divide each example by its own count, as in (token_losses * "
    "mask).sum(1) / mask.sum(1).clamp(min=1), or by a public constant. If the number is a schedule that does not "
    "depend on the data, give it as a Python float."
)


class SharedFactors:
    """Raises if the losses' graph has a factor that is a number of the batch.

    - A number computed from the batch's own tensors is refused at once.
    - An integer, or a tensor with one number, is refused if it changes between batches.
    - A Python float may change (a schedule), unless on two batches it was n or 1 / n, with n the realised batch size
      or a count of valid entries.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._before: dict[int, float] = {}  # the factor at each place in the graph
        self._sizes: defaultdict[int, set[int]] = defaultdict(set)  # batch sizes that it was equal to
        self._counts: defaultdict[int, set[float]] = defaultdict(set)  # counts that it was equal to

    def examine(self, losses: Tensor, batch: Sequence[Tensor]) -> bool:
        """Check the factors of one batch. Returns whether a factor was 0 and is not now."""
        try:
            return self._examine(losses, batch)
        except CoupledExamplesError:
            self._forget()  # the next attempt starts from the beginning
            raise

    def _examine(self, losses: Tensor, batch: Sequence[Tensor]) -> bool:
        has_woken = False
        for place, saved in _factors(losses.grad_fn):
            if isinstance(saved, MarkedTensor) and saved.is_pooled:
                raise CoupledExamplesError(_SHARED)
            if not _is_one_number(saved):
                continue
            now = float(saved.flatten()[0])
            before = self._before.get(place, now)
            self._before[place] = now
            self._compare_size(place, now, len(losses))
            if now == before:
                continue
            has_woken |= before == 0
            is_python_float = saved.dim() == 0 and saved.dtype == torch.float64 and saved.device.type == "cpu"
            if not is_python_float:
                raise CoupledExamplesError(_SHARED)
            if any(_is_near(now, count) for count in _counts(batch)):
                self._counts[place].add(now)
                if len(self._counts[place]) > 1:
                    raise CoupledExamplesError(_SHARED)
        return has_woken

    def _compare_size(self, place: int, factor: float, size: int) -> None:
        """Raise if the factor equals the size of two batches of different sizes: a constant cannot."""
        if not _is_near(factor, size):
            self._sizes.pop(place, None)
            return
        self._sizes[place].add(size)
        if len(self._sizes[place]) > 1:
            raise CoupledExamplesError(_SIZE)


def _factors(root: Node) -> Iterator[tuple[int, Tensor]]:
    """Yield the factors of the losses' terms, each with its place: a hash of the operations on the path to it."""
    stack: list[tuple[Node, int]] = [(root, 0)]
    entered = {root}
    while stack:
        node, path = stack.pop()
        name = node.name()
        if name not in _LINEAR:
            continue
        if name in _SCALES:
            for attribute in ("_saved_other", "_saved_self"):
                saved = getattr(node, attribute, None)
                if isinstance(saved, Tensor):
                    yield hash((path, name, attribute)), saved
        for number, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in entered:
                entered.add(child)
                stack.append((child, hash((path, name, number))))


def _is_one_number(saved: Tensor) -> bool:
    """Whether a factor without gradient holds one number, possibly expanded."""
    if saved.requires_grad or saved.numel() == 0 or saved.dtype.is_complex:
        return False
    return not any(size > 1 and stride for size, stride in zip(saved.shape, saved.stride(), strict=True))


def _is_near(factor: float, count: float) -> bool:
    return any(abs(factor - wanted) <= _NEAR * wanted for wanted in (count, 1 / count))


def _counts(batch: Sequence[Tensor]) -> set[float]:
    """Return counts of valid entries by the usual rules, with and without the first position."""
    found: set[float] = set()
    for tensor in map(plain, batch):
        is_mask = not tensor.is_floating_point() and not tensor.is_complex()
        if is_mask or tensor.dim() <= 2:
            for t in (tensor, tensor[:, 1:]) if tensor.dim() > 1 else (tensor,):
                sums = (t.sum(), *((t != label).sum() for label in _IGNORED))
                found.update(abs(float(count)) for count in sums)
    return {count for count in found if count > 1}


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
    """Raises if losses depend on other examples' inputs, on the first batches and on new parts of the graph."""

    def __init__(self) -> None:
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

    def examine(self, losses: Tensor) -> None:
        """Raise if losses depend on other examples' inputs, or on a number of the whole batch."""
        if len(losses) < 2 or losses.grad_fn is None:
            return
        trace = self._trace
        with torch._C.DisableTorchFunctionSubclass():
            nodes, names = _behind(losses)
            if not set(trace.pairs).isdisjoint(nodes):
                raise CoupledExamplesError(PAIRS)
            if not set(trace.shared).isdisjoint(nodes):
                raise CoupledExamplesError(_SHARED)
            has_woken = self._factors.examine(losses, trace.others)
            lookups = [node for node, name in zip(nodes, names, strict=True) if "Embedding" in name]
            inputs = [*trace.inputs, *_lookups(lookups, trace.others)]
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
