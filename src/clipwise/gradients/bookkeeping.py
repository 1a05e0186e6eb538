"""From a vector of losses to the gradient of every example, in one backward pass.

    walk -> resolve (layouts) -> rules or fallback (forms) -> join by parameter

The result gives norms and weighted sums. Nothing here knows about privacy.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipwise.errors import UnsupportedModelError
from clipwise.gradients import fallback
from clipwise.gradients.derived import Path, path_to
from clipwise.gradients.forms import Budget, Form, Written, at_least_float32
from clipwise.gradients.join import Contribution, join
from clipwise.gradients.layout import Layout, private_generator
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.resolve import Edge, Resolver
from clipwise.gradients.rules import Finish, RuleDoesNotApply, begin
from clipwise.gradients.walk import Graph, Use, gradients_at, node_name, output_shape, walk

_MOST_SIGNATURES = 512
_CHECKED_BATCHES = 2  # of each kind of graph, against plain autograd
_UNDERFLOW = 1e-30  # gradients so short may have lost their digits on the way
KEEP_BYTES = 512 * 2**20  # per-example gradients kept from the norms until the weighted sum

Parameters = Mapping[str, torch.nn.Parameter]


class FallbackWarning(UserWarning):
    """An operation has no rule of its own: its gradients are exact, and slow."""


@dataclass
class Memory:
    """What a run remembers from batch to batch."""

    resolver: Resolver = field(default_factory=Resolver)
    fallbacks: set[str] = field(default_factory=set)
    checked: Counter[tuple[object, ...]] = field(default_factory=Counter)


class PerExampleGradients:
    """The gradients of all examples of one batch, by parameter."""

    def __init__(self, batch: int, by_parameter: dict[str, Contribution]) -> None:
        self.batch = batch
        self._by_parameter = by_parameter

    @torch.no_grad()
    @ieee_arithmetic()
    def squared_norms(self) -> dict[str, Tensor]:
        """Upper bounds on each example's squared norm, by parameter: [B] in float64."""
        budget = Budget(KEEP_BYTES)
        return {name: c.form.squared_norms(budget) for name, c in self._by_parameter.items()}

    def mute(self, muted_B: Tensor) -> None:
        """Make the gradients of these examples 0."""
        for c in self._by_parameter.values():
            c.form.mute(muted_B)

    @torch.no_grad()
    @ieee_arithmetic()
    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """sum_i w_i gradient_i, by parameter, with each parameter's own weights [B]; in float32 or better."""
        return {
            name: at_least_float32(c.path.pull(c.form.weighted_sum(weights[name]))[name])
            for name, c in self._by_parameter.items()
        }

    @torch.no_grad()
    @ieee_arithmetic()
    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        """The gradients of some examples, written out: [b, *shape]."""
        return {
            name: c.path.pull_each(c.form.instantiate(examples))[name]
            for name, c in self._by_parameter.items()
        }

    def mass(self, example: int) -> float:
        """The size of the terms that an example's gradient is summed from, over all parameters."""
        return math.hypot(*(c.form.mass(example) for c in self._by_parameter.values()))


@torch.no_grad()
def by_bookkeeping(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Per-example gradients from the autograd graph of `losses`, which this frees."""
    if len(losses) == 1:
        return by_loop(losses, parameters)  # one example: the plain gradient, and nothing to lay out
    graph = walk(losses, parameters)
    layouts, gradients = memory.resolver.resolve(graph)
    probed = gradients is not None
    shapes = {use: {j: output_shape(*source) for j, source in use.operands.items()} for use in graph.uses}
    begun = {use: begin(use.node, shapes[use]) for use in graph.uses}
    if gradients is None:
        edges = [(use.node, k) for use in graph.uses for k in use.outputs]
        # The fallback calls nodes after this pass, so they must keep what they saved.
        slow = any(finish is None or node_name(use.node) in memory.fallbacks for use, finish in begun.items())
        gradients = gradients_at(graph, edges, torch.ones_like(losses), retain=slow)
    found = []
    for use in graph.uses:
        outputs = {k: gradients[(use.node, k)] for k in use.outputs}
        forms = _forms(use, begun[use], shapes[use], outputs, layouts, graph, memory)
        for j, source in use.operands.items():
            found.append(Contribution(forms[j], path_to(*source, graph.names, parameters)))
    result = PerExampleGradients(len(losses), join(parameters, found))
    if probed and memory.checked[graph.signature] < _CHECKED_BATCHES:
        _check(result, losses, parameters)
        if len(memory.checked) >= _MOST_SIGNATURES:
            memory.checked.clear()
        memory.checked[graph.signature] += 1
    return result


@torch.no_grad()
def by_loop(losses: Tensor, parameters: Parameters) -> PerExampleGradients:
    """The reference: one backward pass for each example.

    It goes through the rows of all examples, with 0 for the others, and 0 * NaN is NaN: where an example
    is not finite, only book-keeping tells the others from it.
    """
    walk(losses, parameters)  # refuses what takes no part in the losses
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(len(losses)):
        for name, g in _single(losses, i, parameters).items():
            rows[name].append(g)
    if len(losses) > 1 and not all(bool(torch.isfinite(g).all()) for each in rows.values() for g in each):
        return by_bookkeeping(losses, parameters, Memory())
    return PerExampleGradients(
        len(losses),
        {
            name: Contribution(
                Written.of(at_least_float32(torch.stack(g))), Path.identity(name, parameters[name])
            )
            for name, g in rows.items()
        },
    )


def _single(losses: Tensor, example: int, parameters: Parameters, weight: float = 1) -> dict[str, Tensor]:
    """The gradient of one loss times a weight, by plain autograd."""
    one = torch.zeros_like(losses)
    one[example] = weight
    targets = list(parameters.values())
    grads = torch.autograd.grad(losses, targets, one, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense()
        for (name, p), g in zip(parameters.items(), grads, strict=True)
    }


def _forms(
    use: Use,
    finish: Finish | None,
    shapes: Mapping[int, torch.Size],
    outputs: Mapping[int, Tensor],
    layouts: Mapping[Edge, Layout],
    graph: Graph,
    memory: Memory,
) -> dict[int, Form]:
    if finish is not None:
        try:
            return finish(outputs[0], layouts[(use.node, 0)])
        except (RuleDoesNotApply, KeyError):
            pass
    name = node_name(use.node)
    if name not in memory.fallbacks:
        memory.fallbacks.add(name)
        warnings.warn(
            f"{use.describe(graph.names)} has no rule: its per-example gradients come from one backward call "
            "an example, which is exact but slow. clipwise.gradients.register can add a rule.",
            FallbackWarning,
            stacklevel=2,
        )
    return fallback.forms(use.node, shapes, outputs, {k: layouts[(use.node, k)] for k in outputs})


def _check(result: PerExampleGradients, losses: Tensor, parameters: Parameters) -> None:
    """Compare with plain autograd, whenever a graph is new: a rule that reads torch's saved tensors wrongly
    is found before anything is released.

    It would be wrong for every example. One whose gradient is not all rounding decides, of three.
    """
    disagreed = ""
    for i in torch.randperm(len(losses), generator=private_generator())[:3].tolist():
        truth = _single(losses, i, parameters)
        name = _disagreement(result, losses, i, truth, parameters)
        if name is None and max(map(_norm, truth.values())) > _UNDERFLOW:
            return
        disagreed = name or disagreed
    if disagreed:
        raise UnsupportedModelError(
            f"The per-example gradient of {disagreed!r} does not agree with plain autograd, so clipwise "
            "cannot be sure of its norm. Please report this model; method='loop' is exact."
        )


def _disagreement(
    result: PerExampleGradients,
    losses: Tensor,
    example: int,
    truth: Mapping[str, Tensor],
    parameters: Parameters,
) -> str | None:
    """A parameter whose gradient is not the true one, up to rounding."""
    thrice = _single(losses, example, parameters, weight=3)
    ours = result.instantiate(slice(example, example + 1))
    # Where terms cancel, rounding is large beside the result: three times the loss rounds otherwise.
    noise = max(_norm(thrice[name] / 3 - t) for name, t in truth.items())
    rounding = 1e-5 * max(result.mass(example), *map(_norm, truth.values())) + 100 * noise + _UNDERFLOW
    for name, t in truth.items():
        if _norm(ours[name][0] - t) > 1e-2 * _norm(t) + rounding:  # False for NaN: it will be muted anyway
            return name
    return None


def _norm(t: Tensor) -> float:
    return float(t.double().norm())
