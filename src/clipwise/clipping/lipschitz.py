"""Bound the weights, not the gradients: what one example can do follows from the norms of the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping import outputs as at_outputs
from clipwise.clipping.base import (
    Bound,
    Clipper,
    Parameters,
    Site,
    Split,
    StatementText,
    Strategy,
    damaged,
    require_entries,
    require_records,
)
from clipwise.clipping.grouping import Groups, Policy, described_groups, group_parameters
from clipwise.clipping.noise_split import require_split
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.gradients.precision import chosen_arithmetic
from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz import losses as bounded_losses
from clipwise.lipschitz import weights
from clipwise.lipschitz.balance import balance_, pairs_of
from clipwise.lipschitz.bounds import Bounds, Measured, bounds_from, bounds_of
from clipwise.lipschitz.losses import BoundedLoss, SoftmaxCrossEntropy, clip_output_gradients
from clipwise.lipschitz.output_graph_check import GraphMatch
from clipwise.lipschitz.rule import Effort
from clipwise.lipschitz.trace import Network, example_shape, trace, unit_of
from clipwise.lipschitz.traced_model_check import AsTraced
from clipwise.lipschitz.weights import NORMS, MaxWeightNorm
from clipwise.privacy import Unit
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.arguments import number, one_of, require_bool, with_plain_numbers
from clipwise.validation.tensor_changes import Changes

_SMALLEST = 1e-12  # of a sensitivity: noise that float32 rounds to nothing would hide nothing
_LARGEST = 2.0**50  # of any value or gradient: its square is still a number in float32

_AS_TRACED = (
    "layers keep the bounds that are derived from the norms of their weights: proven for each kind of layer, and every "
    "step's graph is compared with the one that they were derived for"
)
_FOLLOWING = (
    " (of the step that was next then: bounds follow the released weights, and the noise follows them)"
)


@dataclass(frozen=True)
class Lipschitz(Strategy):
    """Weight clipping (Lip-DP-SGD): layers of bounded norm give gradients of bounded norm, and nothing else is clipped.

    Weights are clipped after each update. From their norms follow how large each value of the network can be, how
    much a gradient can grow on its way back, and so the most that one example adds to each parameter's gradient:

        X_{k+1} = |layer k| X_k,    l_k = l_{k+1} |layer k|,    Delta_k = l_{k+1} X_k

    (`clipwise.lipschitz` has the rules of every layer). No per-example gradient is formed, so that a step costs what an
    ordinary one costs. Unlike a clipped gradient, a bounded one is not biased.

    The model begins with a `layers.ClipInput(input_norm)`, or with an embedding of ids. A step takes what the model
    returned as well: `private.step(losses, outputs=outputs)`.

    Args:
        max_weight_norm: C_k, the largest norm of each layer's weights and of each bias: one number, or a mapping from
            the names of modules or parameters.
        input_norm: X_1, that of the `ClipInput`. None for a model of ids.
        norm: by which weights are clipped. "frobenius" is a projection; "spectral" allows more weights, but may stop
            short of the best ones. The bounds use spectral norms in both cases.
        fixed: Fix-Lip-DP-SGD: after each update every weight is rescaled to norm C_k, up or down, theta <- C theta /
            |theta|; biases are clipped to C_k. The bounds follow from the C_k alone, the same in each step.
        temperature: tau of the softmax cross-entropy -log softmax(z / tau)_y, if no `loss` is given.
        split: how the noise is divided over the parts: "optimal", "equal", or a weight for each part.
        loss: a `lipschitz.BoundedLoss`. Its constant bounds each example's gradient at the model's output, which is
            clipped to it: another loss, or one that is scaled, is bounded too.
        parts: what gets noise of its own: "tensor", each parameter, which with the optimal split needs the least
            noise; "layer", "all", or groups of names.
        tight: operator norms of convolutions by Fourier transforms: less noise, for many times the time.
        balanced: move factors between layers so that the bounds add up to less noise; the network computes the same.
            See `lipschitz.balance`. Averaged parameters are moved along; the optimizer's state (momentum) is not.
        input_shape: of one example. By default that of the first tensor of a batch.

    Guarantee:
        Adjacency: zero-out (sensitivity Delta_k of part k) and replace-one (2 Delta_k), under every sampling scheme
        that knows the adjacency but "partition". Unit: one record. Delta_k follows from the weights before the step,
        which were released, and from public constants. It may change from step to step; the noise follows, the
        multiplier stays.
        Assumptions: an example's row of the model's input depends on that example only (probed on the first batches,
        not proven). That the model treats each row by itself is shown by its trace. Every step compares the graph that
        ran, and what the model reads, with the trace; what it reads stays the same from its forward pass to the step.
        Each loss depends on its own outputs only (compared in every step, as far as a gradient shows it), and on its
        own targets (as far as shapes show it: a loss with the mean of all targets in it has no bound).
        Norms are certified upper bounds in float64, with room for the rounding of the network's own arithmetic; the sum
        over B examples is formed in that arithmetic, which moves it by a few times B u Delta_k, u = 2^-24 in
        float32, for which there is no noise. An example that is not finite counts as 0.
    """

    max_weight_norm: MaxWeightNorm
    input_norm: float | None
    norm: str = "spectral"
    fixed: bool = False
    temperature: float = 1.0
    split: Split = "optimal"
    loss: BoundedLoss | None = None
    parts: Groups = "tensor"
    tight: bool = False
    balanced: bool = False
    input_shape: Sequence[int] | None = None

    name = "lipschitz"
    bounds_inside = True
    allows_batch_norm = True  # the trace refuses batch statistics, and names a layer that has bounds

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        one_of("norm", self.norm, NORMS)
        require_split(self.split)
        for name in ("fixed", "tight", "balanced"):
            require_bool(name, getattr(self, name))
        if self.balanced and self.fixed:
            raise ConfigurationError(
                "balanced=True does not go with fixed=True, whose bounds follow from max_weight_norm alone: choose a "
                "norm for each layer instead."
            )
        if self.input_norm is not None:
            number("input_norm", self.input_norm, above=0)
        if isinstance(self.parts, Policy):
            raise ConfigurationError(
                f"parts={type(self.parts).__name__}(...) chooses bounds for clipping gradients, and those of Lipschitz "
                "follow from the weights: use 'tensor', 'layer', 'all' or lists of names."
            )
        if self.loss is None:
            SoftmaxCrossEntropy(self.temperature)
            return
        bounded_losses.require_bounded(self.loss)
        if self.temperature != 1:
            raise ConfigurationError(
                "temperature belongs to the softmax cross-entropy that is taken without `loss`: give it to the loss."
            )

    @property
    def bounded_loss(self) -> BoundedLoss:
        """The loss whose constant is used: from outputs and targets to one loss an example."""
        return SoftmaxCrossEntropy(self.temperature) if self.loss is None else self.loss

    def attach(self, site: Site) -> Clipper:
        """Trace the model, clip its weights, and bound its gradients; or refuse what has no bound, by name."""
        require_records(site.unit, "Lipschitz")
        require_entries(site.parameters, "Lipschitz")
        arithmetic = chosen_arithmetic(next(iter(site.parameters.values())).device)
        network = trace(site.model, self._shape(site), arithmetic)
        self._require_input_norm(network)
        _require_reached(network, site.parameters)
        return LipschitzClipper(self, site, network)

    def _shape(self, site: Site) -> tuple[int, ...]:
        if self.input_shape is not None:
            return example_shape(self.input_shape)
        first = next(tensors_in(site.empty_batch()), None) if site.empty_batch is not None else None
        if first is None or first.dim() == 0 or len(first) != 0:
            raise ConfigurationError(
                "Lipschitz: the shape of one example cannot be read off dataset: give input_shape, for "
                "instance Lipschitz(..., input_shape=(1, 28, 28))."
            )
        return tuple(first.shape[1:])

    def _require_input_norm(self, network: Network) -> None:
        """The model's ClipInput has the norm that is given here, and there is none if none is given."""
        given = "None" if self.input_norm is None else f"{self.input_norm:g}"
        clips = [m.max_norm for m in network.graph.modules() if isinstance(m, ClipInput)]
        if not clips and self.input_norm is not None:
            raise ConfigurationError(
                f"input_norm={given}, but the model has no ClipInput: it begins with an embedding of ids. Give "
                "input_norm=None."
            )
        for norm in clips:
            if norm != self.input_norm:
                raise ConfigurationError(
                    f"input_norm={given}, but the model clips its inputs to {norm:g} (ClipInput): give the same number "
                    "to both."
                )

    def describe(self) -> dict[str, Any]:
        limits = self.max_weight_norm
        plain = ("input_norm", "norm", "fixed", "tight", "balanced")
        return {
            "strategy": self.name,
            "max_weight_norm": dict(limits) if isinstance(limits, Mapping) else limits,
            **{name: getattr(self, name) for name in plain},
            "loss": repr(self.bounded_loss),
            "parts": described_groups(self.parts),
            "split": self.split if isinstance(self.split, str) else dict(self.split),
        }

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        fixed = recorded.get("fixed")
        which = ", which are rescaled to max_weight_norm" if fixed else ""
        return StatementText(
            sum=f"the sum of gradients, each of them bounded by the norms of the weights{which}",
            assumptions=(_AS_TRACED,),
            changing="" if fixed else _FOLLOWING,
        )


class LipschitzClipper(Clipper):
    """`Lipschitz` for one model."""

    is_capturable = False
    needs_outputs = True
    moves_weights = True

    def __init__(self, strategy: Lipschitz, site: Site, network: Network) -> None:
        self._strategy, self._site, self._network = strategy, site, network
        self._parameters = site.parameters
        self.arithmetic = network.rounding.arithmetic
        self.divisor = site.scheme.expected_size
        self._groups = group_parameters(strategy.parts, site.parameters)
        limits = weights.limits_of(network, strategy.max_weight_norm)
        self._limits = {name: limits[name] for name in site.parameters}
        self._constant = bounded_losses.constant_of(strategy.bounded_loss, network.output_shape)
        self._as_traced = AsTraced(site.model, network)
        self._match = GraphMatch(network)
        self._repeated = at_outputs.RepeatedOutputs()
        self._watch = Changes([*network.graph.parameters(), *network.graph.buffers()])
        self._pairs = pairs_of(network, site.parameters) if strategy.balanced else []
        self._ratios: dict[str, float] = {}
        self._norms: Measured = {}
        self._fixed: Bounds | None = None
        self._is_loaded = False
        self.follow(is_updated=True)

    def follow(self, is_updated: bool) -> bool:
        """After an update: clip the weights, and derive the bounds of the next step from them."""
        if not is_updated and not self._is_loaded and not self._watch.may_have_changed():
            return False
        certified = self._fixed_bounds() if self._strategy.fixed else self._current_bounds()
        _require_representable(certified, self._network.input)
        self.bounds = tuple(
            Bound(part, tuple(names), self._site.factor * max(certified.together(names), _SMALLEST))
            for part, names in self._groups.items()
        )
        self._watch.remember()
        self._is_loaded = False
        return True

    def on_limit(self) -> dict[str, bool]:
        return {name: weights.is_on_limit(ratio) for name, ratio in self._ratios.items()}

    def _current_bounds(self) -> Bounds:
        effort: Effort = "tight" if self._strategy.tight else "spectral"
        norms, self._ratios = weights.clip_and_measure_(
            self._network, self._limits, self._strategy.norm, effort
        )
        if not (self._is_loaded and _are_slightly_below(norms, self._norms)):
            self._norms = norms
        found = bounds_from(self._network, self._norms, self._constant)
        self.moved = balance_(
            self._network, self._pairs, found, self._norms, self._limits, self._strategy.norm
        )
        if self.moved:
            found = bounds_from(self._network, self._norms, self._constant)
        return found

    def _fixed_bounds(self) -> Bounds:
        self._ratios = weights.rescale_(self._network, self._limits, self._strategy.norm)
        for name, ratio in self._ratios.items():
            if not math.isfinite(ratio):
                what = f"the weights {name!r} are not finite"
                raise UnsupportedModelError(f"Lipschitz: {what}: take a smaller learning rate.")
        if self._fixed is None:
            found = bounds_of(self._network, self._constant, limits=self._limits)
            # What is frozen, and every buffer, is measured, since it may be changed; for the rest the bounds stay.
            is_constant = not any(True for _ in self._network.graph.buffers()) and all(
                n in self._limits for op in self._network.operations for n in op.parameters.values()
            )
            self._fixed = found if is_constant else None
            return found
        return self._fixed

    def state_dict(self) -> dict[str, Any]:
        """The norms of the weights, as they were bounded: those of clipped weights are not measured again."""
        return {"weight_norms": {op: dict(found) for op, found in self._norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over norms; when the next batch is drawn they are compared with those of the weights that are there."""
        norms = state.get("weight_norms")
        if not (isinstance(norms, Mapping) and _are_alike(norms, self._norms)):
            raise damaged("the norms of the weights are missing")
        self._norms, self._is_loaded = {op: dict(found) for op, found in norms.items()}, True
        return False

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        raise StepError(
            "Lipschitz bounds gradients from the model's output on: call private.step(losses, outputs=outputs) with "
            "outputs = model(x), of which the losses were computed."
        )

    def sum_at_outputs(self, losses: Tensor, outputs: Tensor | None) -> dict[str, Tensor]:
        """sum_i J_i^T [g_i]_L: the gradient at each output, clipped to the loss's constant L, and one backward pass."""
        if outputs is None:
            return self.clipped_sum(losses)
        at_outputs.require_outputs(outputs)
        if len(losses) == 0:
            return self.nothing()
        self._require_as_bounded(outputs)
        found_at = at_outputs.gradients_at_outputs(losses, outputs, self._parameters)
        self._repeated.require_none(losses, outputs)
        # Both questions are asked in one go: on an accelerator each of them waits for all that was begun.
        has_moved, are_coupled = at_outputs.asked_together(self._watch.has_moved(), found_at.are_coupled)
        self._require_unchanged(has_moved)
        at_outputs.require_not_coupled(are_coupled)
        # An example with several rows, such as views, counts as one: each row has its share.
        gradients = clip_output_gradients(found_at.gradients, self._constant / found_at.rows)
        with self.arithmetic.products():
            found = torch.autograd.grad(outputs, list(self._parameters.values()), gradients)
        return {
            name: g.to_dense() if g.is_sparse else g for name, g in zip(self._parameters, found, strict=True)
        }

    def _require_as_bounded(self, outputs: Tensor) -> None:
        """The bounds are for these weights and this arithmetic, and for gradients that no hook changes."""
        self._require_unchanged(self._watch.was_counted())
        if unit_of(self._network.graph) > self._network.rounding.unit:
            raise StepError(
                "The model's parameters were given a coarser type after make_private, and the bounds allow for less "
                "rounding: call model.double() again, or make a new private run."
            )
        device = next(iter(self._parameters.values())).device
        if chosen_arithmetic(device).operand_error > self.arithmetic.operand_error:
            raise StepError(
                "torch.set_float32_matmul_precision was lowered after make_private, and the bounds allow for less "
                "rounding: set it back, or make a new private run."
            )
        self._as_traced.require()
        for name, tensor in (*self._parameters.items(), ("outputs", outputs)):
            if tensor._backward_hooks:
                raise StepError(
                    f"{name!r} has a hook on its gradient, which may change it after it was bounded: take the hook off."
                )
        self._match.require(outputs)

    def _require_unchanged(self, has_changed: bool) -> None:
        if has_changed:
            raise StepError(
                "The weights were changed between the draw of a batch and private.step: the bounds are for the weights "
                "before. Change them before the next batch is drawn, in place and under torch.no_grad(): what is "
                "written through .data an accelerator shows too late."
            )


def _are_alike(one: Mapping[str, Any], other: Measured) -> bool:
    """Whether norms are of the same operations and of the same kinds."""
    return one.keys() == other.keys() and all(
        isinstance(one[op], Mapping)
        and one[op].keys() == found.keys()
        and all(isinstance(value, float) for value in one[op].values())
        for op, found in other.items()
    )


def _are_slightly_below(norms: Measured, loaded: Measured) -> bool:
    """Whether loaded norms hold for these weights, and are those of these weights: then a run goes on bit for bit."""
    return all(
        value <= loaded[op][name] <= value * (1 + 1e-3) + 1e-12
        for op, found in norms.items()
        for name, value in found.items()
    )


def _require_reached(network: Network, parameters: Parameters) -> None:
    """Every trainable parameter has a bound."""
    known = {full for op in network.operations for full in op.parameters.values()}
    for name in parameters:
        if name not in known:
            raise UnsupportedModelError(
                f"Trainable parameter {name!r} takes no part in the model's forward pass as it was traced, so its "
                "private gradient would be pure noise. Freeze it with requires_grad_(False), or use it."
            )


def _require_representable(bounds: Bounds, unclipped: str) -> None:
    """One example that overflows would turn the whole sum into NaN."""
    values = [norm for name, norm in bounds.norms.items() if name != unclipped]
    largest = max(*values, *bounds.gradients.values(), *bounds.sensitivities.values())
    if not largest < _LARGEST:
        raise UnsupportedModelError(
            f"Lipschitz: a value or a gradient may be as large as {largest:.2g}, for weights of such norms: take a "
            "smaller max_weight_norm or input_norm, or fewer layers."
        )
