"""Weight clipping: the sensitivity follows from the norms of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import (
    Bound,
    Clipper,
    Site,
    Split,
    StatementText,
    Strategy,
    damaged,
    require_entries,
    require_split,
)
from clipwise.clipping.outputs import gradients_at_outputs
from clipwise.clipping.thresholds import Groups, Policy, described_groups, group_parameters
from clipwise.errors import (
    ConfigurationError,
    CoupledExamplesError,
    StepError,
    UnreachedParametersError,
    UnsupportedModelError,
)
from clipwise.gradients.precision import chosen_arithmetic
from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz import losses as bounded_losses
from clipwise.lipschitz import weights
from clipwise.lipschitz.bounds import Bounds, MeasuredNorms, bounds_from, bounds_of
from clipwise.lipschitz.losses import BoundedLoss, SoftmaxCrossEntropy, clip_output_gradients
from clipwise.lipschitz.rule import Effort
from clipwise.lipschitz.trace import Network, trace, unit_of
from clipwise.lipschitz.traced_model_check import AsTraced, GraphMatch
from clipwise.lipschitz.weights import NORMS, MaxWeightNorm, balance_, pairs_of
from clipwise.privacy import Unit
from clipwise.sampling.batch_structure import tensors_in
from clipwise.validation.arguments import number, one_of, require_bool, with_plain_numbers
from clipwise.validation.inventory import Changes

_SMALLEST = 1e-12  # of a sensitivity: float32 would round smaller noise away
_LARGEST = 2.0**50  # of any value or gradient: its square does not overflow in float32

_AS_TRACED = (
    "layers satisfy the bounds derived from the norms of their weights: proven for each kind of layer, and the graph "
    "of every step is compared with the traced graph"
)
_FOLLOWING = " (of the next step: bounds are recomputed from the released weights, and the noise is scaled with them)"


@dataclass(frozen=True)
class Lipschitz(Strategy):
    """Weight clipping (Lip-DP-SGD): weights of bounded norm give gradients of bounded norm, without gradient clipping.

    Weights are clipped after each update. Their norms bound the activations, the growth of gradients in the backward
    pass, and so the contribution of one example to the gradient of each parameter:

        X_{k+1} = |layer k| X_k,    l_k = l_{k+1} |layer k|,    Delta_k = l_{k+1} X_k

    (`clipwise.lipschitz` has the rules of every layer). No per-example gradient is computed.

    The model must begin with a `layers.ClipInput(input_norm)` or with an embedding of ids. A step also needs the
    outputs of the model: `private.step(losses, outputs=outputs)`.

    Args:
        max_weight_norm: C_k, the largest norm of each layer's weights and of each bias: one number, or a mapping from
            the names of modules or parameters.
        input_norm: X_1, the norm of the `ClipInput`. None for a model that begins with an embedding.
        norm: the norm to which weights are clipped. "frobenius" is a projection; "spectral" allows more weights, but
            training may not converge to the best ones. The bounds use spectral norms in both cases.
        fixed: Fix-Lip-DP-SGD: after each update every weight is rescaled to norm C_k, up or down, theta <- C theta /
            |theta|; biases are clipped to C_k. The bounds depend only on the C_k and are the same in each step.
        temperature: tau of the softmax cross-entropy -log softmax(z / tau)_y, if no `loss` is given.
        split: how the noise is divided over the parts: "optimal", "equal", or a weight for each part.
        loss: a `lipschitz.BoundedLoss`. Each example's gradient at the model's output is clipped to its constant, so
            that other or rescaled losses are bounded too.
        parts: the parts with separate noise: "tensor" (each parameter), which needs the least noise with the optimal
            split; "layer", "all", or groups of names.
        tight: compute operator norms of convolutions by Fourier transforms: less noise, but much slower.
        balanced: move factors between layers to reduce the noise, without changing the function of the network. See
            `lipschitz.balance`. Averaged parameters are rescaled too; the optimizer's state (momentum) is not.
        input_shape: the shape of one example. By default that of the first tensor of a batch.

    Guarantee:
        - Adjacency: zero-out (sensitivity Delta_k of part k) and replace-one (2 Delta_k), under every sampling scheme
          that supports the adjacency, except "partition". Delta_k depends on the released weights before the step and
          on public constants. If it changes, the noise is scaled with it, and the multiplier stays the same.
        - Unit: one record.
        - Assumption: an example's row of the model's input depends on that example only (probed on the first batches,
          not proven). The trace shows that the model processes rows independently. Every step compares its graph, and
          the tensors that the model reads, with the trace.
        - Assumption: each loss depends only on its own outputs (checked in every step by gradients) and on its own
          targets (comparisons of all examples with all targets are refused; a mean of all targets is not detected).
        - Norms are certified upper bounds in float64, with a margin for the rounding of the network's arithmetic. The
          sum over B examples uses that arithmetic, which changes it by a few times B u Delta_k, u = 2^-24 in float32.
          No noise is added for this. An example with a non-finite gradient is replaced by 0.
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
    needs_whole_weights = "Lipschitz"
    bounds_inside = True
    allows_batch_norm = True  # the trace raises for batch statistics, and names a layer with bounds

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        one_of("norm", self.norm, NORMS)
        require_split(self.split)
        for name in ("fixed", "tight", "balanced"):
            require_bool(name, getattr(self, name))
        if self.balanced and self.fixed:
            raise ConfigurationError(
                "balanced=True is not supported with fixed=True, where bounds depend only on max_weight_norm: choose a "
                "norm for each layer instead."
            )
        if self.input_norm is not None:
            number("input_norm", self.input_norm, above=0)
        if isinstance(self.parts, Policy):
            raise ConfigurationError(
                f"parts={type(self.parts).__name__}(...) chooses clipping norms for gradients, but Lipschitz derives "
                "its bounds from the weights: use 'tensor', 'layer', 'all' or lists of names."
            )
        bounded_losses.require_bounded(self.bounded_loss)
        if self.loss is not None and self.temperature != 1:
            raise ConfigurationError(
                "temperature is for the default softmax cross-entropy only: pass it to the given `loss` instead."
            )

    @property
    def bounded_loss(self) -> BoundedLoss:
        """The loss that defines the constant: outputs and targets -> one loss per example."""
        return SoftmaxCrossEntropy(self.temperature) if self.loss is None else self.loss

    def attach(self, site: Site) -> Clipper:
        """Trace the model, clip its weights and bound its gradients. Raises for a layer without a bound."""
        require_entries(site.parameters, "Lipschitz")
        arithmetic = chosen_arithmetic(next(iter(site.parameters.values())).device)
        network = trace(site.model, self._shape(site), arithmetic)
        self._require_input_norm(network)
        if missing := tuple(name for name in site.parameters if name not in network.uses):
            raise UnreachedParametersError(missing)
        return LipschitzClipper(self, site, network)

    def _shape(self, site: Site) -> Sequence[int]:
        if self.input_shape is not None:
            return self.input_shape
        first = next(iter(tensors_in(site.empty_batch())), None) if site.empty_batch is not None else None
        if first is None or first.dim() == 0 or len(first) != 0:
            raise ConfigurationError(
                "Lipschitz: the shape of one example cannot be inferred from dataset: pass input_shape, for "
                "instance Lipschitz(..., input_shape=(1, 28, 28))."
            )
        return first.shape[1:]

    def _require_input_norm(self, network: Network) -> None:
        """Require that `input_norm` is the norm of the model's ClipInput, or None without one."""
        given = "None" if self.input_norm is None else f"{self.input_norm:g}"
        clips = [m.max_norm for m in network.graph.modules() if isinstance(m, ClipInput)]
        if not clips and self.input_norm is not None:
            raise ConfigurationError(
                f"input_norm={given}, but the model has no ClipInput (it begins with ids): pass input_norm=None."
            )
        for norm in clips:
            if norm != self.input_norm:
                raise ConfigurationError(
                    f"input_norm={given}, but the model clips its inputs to {norm:g} (ClipInput): give one number."
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
            sum=f"the sum of per-example gradients, bounded by the norms of the weights{which}",
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
        self._watch = Changes([*network.graph.parameters(), *network.graph.buffers()])
        self._pairs = pairs_of(network, site.parameters) if strategy.balanced else []
        self._ratios: dict[str, float] = {}
        self._norms: MeasuredNorms = {}
        self._fixed: Bounds | None = None
        self._is_loaded = False
        self.follow(is_updated=True)

    def follow(self, is_updated: bool) -> bool:
        """After an update, clip the weights and compute the bounds of the next step."""
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
        return weights.on_limit(self._ratios)

    def _current_bounds(self) -> Bounds:
        network, norm = self._network, self._strategy.norm
        effort: Effort = "tight" if self._strategy.tight else "spectral"
        norms, self._ratios = weights.clip_and_measure_(network, self._limits, norm, effort)
        if not (self._is_loaded and _are_slightly_below(norms, self._norms)):
            self._norms = norms
        found = bounds_from(network, self._norms, self._constant)
        self.moved = balance_(network, self._pairs, found, self._norms, self._limits, norm)
        return bounds_from(network, self._norms, self._constant) if self.moved else found

    def _fixed_bounds(self) -> Bounds:
        self._ratios = weights.rescale_(self._network, self._limits, self._strategy.norm)
        for name, ratio in self._ratios.items():
            if not math.isfinite(ratio):
                raise UnsupportedModelError(f"Lipschitz: weights {name!r} are not finite: use a smaller learning rate.")
        if self._fixed is not None:
            return self._fixed
        found = bounds_of(self._network, self._constant, limits=self._limits)
        # Frozen parameters and buffers may change, so they are measured again; otherwise the bounds are constant.
        if not list(self._network.graph.buffers()) and self._network.uses.keys() <= self._limits.keys():
            self._fixed = found
        return found

    def state_dict(self) -> dict[str, Any]:
        """The certified norms of the weights."""
        return {"weight_norms": {op: dict(found) for op, found in self._norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load the norms. When the next batch is drawn they are compared with those of the current weights."""
        try:
            saved = state["weight_norms"]
            norms = {op: {name: float(saved[op][name]) for name in found} for op, found in self._norms.items()}
        except (KeyError, TypeError, ValueError):
            raise damaged("the norms of the weights are missing") from None
        self._norms, self._is_loaded = norms, True
        return False

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        raise StepError(
            "Lipschitz needs the model's outputs: call private.step(losses, outputs=outputs) with outputs = model(x), "
            "from which the losses were computed."
        )

    def sum_at_outputs(self, losses: Tensor, outputs: Tensor | None) -> dict[str, Tensor]:
        """sum_i J_i^T [g_i]_L: clip gradients at the outputs to the constant L of the loss; one backward pass."""
        if outputs is None:
            return self.clipped_sum(losses)
        if not isinstance(outputs, Tensor):
            raise StepError(f"outputs must be the tensor that the model returned, not {type(outputs).__name__}.")
        if len(losses) == 0:
            return self.nothing()
        self._require_as_bounded(outputs)
        gradients, coupled = gradients_at_outputs(losses, outputs, self._parameters)
        # Both flags are read in one transfer, since each read synchronizes with the device.
        moved = torch.as_tensor(self._watch.has_moved(), device=coupled.device)
        has_moved, are_coupled = torch.stack([moved, coupled]).tolist()
        self._require_unchanged(has_moved)
        if are_coupled:
            raise CoupledExamplesError(
                "The loss of one example depends on the outputs of another, so per-example bounds do not hold: do not "
                "subtract a mean over the batch, compare examples, or divide by a quantity of the whole batch."
            )
        # An example with several rows (views) counts as one: the constant is divided over its rows.
        gradients = clip_output_gradients(gradients, self._constant / (len(outputs) // len(losses)))
        with self.arithmetic.products():
            found = torch.autograd.grad(outputs, list(self._parameters.values()), gradients)
        return {name: g.to_dense() if g.is_sparse else g for name, g in zip(self._parameters, found, strict=True)}

    def _require_as_bounded(self, outputs: Tensor) -> None:
        """Require the weights and the arithmetic of the bounds, and no hooks on gradients."""
        self._require_unchanged(self._watch.was_counted())
        if unit_of(self._network.graph) > self._network.rounding.unit:
            raise StepError(
                "The model's parameters were converted to a coarser type after make_private, with more rounding than "
                "the bounds include: call model.double() again, or create a new private run."
            )
        device = next(iter(self._parameters.values())).device
        if chosen_arithmetic(device).operand_error > self.arithmetic.operand_error:
            raise StepError(
                "torch.set_float32_matmul_precision was lowered after make_private, with more rounding than the bounds "
                "include: reset it, or create a new private run."
            )
        self._as_traced.require()
        for name, tensor in (*self._parameters.items(), ("outputs", outputs)):
            if tensor._backward_hooks:
                raise StepError(
                    f"{name!r} has a hook on its gradient, which may change the bounded gradient: remove the hook."
                )
        self._match.require(outputs)

    def _require_unchanged(self, has_changed: bool) -> None:
        if has_changed:
            raise StepError(
                "The weights were changed between the draw of a batch and private.step, so the bounds do not hold. "
                "Change weights before the next batch is drawn, under torch.no_grad() and not through .data."
            )


def _are_slightly_below(norms: MeasuredNorms, loaded: MeasuredNorms) -> bool:
    """Whether loaded norms are valid and almost tight for the weights: then a resumed run continues bit for bit."""
    return all(
        value <= loaded[op][name] <= value * (1 + 1e-3) + 1e-12
        for op, found in norms.items()
        for name, value in found.items()
    )


def _require_representable(bounds: Bounds, unclipped: str) -> None:
    """Raise if values may overflow: one overflow would turn the whole sum into NaN."""
    values = [norm for name, norm in bounds.norms.items() if name != unclipped]
    largest = max(*values, *bounds.gradients.values(), *bounds.sensitivities.values())
    if not largest < _LARGEST:
        raise UnsupportedModelError(
            f"Lipschitz: with these weight norms a value or a gradient may be as large as {largest:.2g}: use a smaller "
            "max_weight_norm or input_norm, or fewer layers."
        )
