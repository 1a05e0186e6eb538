"""Sensitivities from bounds on values (forward) and on gradients (backward).

    X_{k+1} = largest_k(X_k)          l_k = l_{k+1} gain_k          Delta_k = l_{k+1} parameter_gain_k

On a graph, gradients add up over the uses of a value and over the uses of a parameter. The inputs of a concatenation
share one gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.lipschitz.matrix_norms import measured_together
from clipwise.lipschitz.rule import EFFORTS, Effort, Reach
from clipwise.lipschitz.trace import Network, Operation
from clipwise.validation.arguments import number, one_of

_SLACK = 1 + 2.0**-30  # for the float64 arithmetic of this module


@dataclass(frozen=True)
class Bounds:
    """Bounds that hold for every example at the current weights. They are functions of released values.

    Args:
        sensitivities: the largest L2 norm of one example's gradient, per parameter.
        norms: X, the largest norm of each value, by its name in the graph.
        gradients: l, the largest norm of one example's gradient at each value.
    """

    sensitivities: Mapping[str, float]
    norms: Mapping[str, float]
    gradients: Mapping[str, float]

    def together(self, parameters: Iterable[str]) -> float:
        """The largest norm of one example's gradient of several parameters together."""
        return math.hypot(*(self.sensitivities[name] for name in parameters)) * _SLACK


class Lengths:
    """A bound on a gradient's norm that records the concatenations on its path.

    It represents sum_k a_k s_k, where the s_k of one concatenation satisfy sum s_k^2 <= 1. The largest value is
    therefore the sum over concatenations of sqrt(sum a_k^2): two concatenated branches with gains a and b give sqrt(a^2
    + b^2), not a + b.
    """

    __slots__ = ("_coefficients",)

    def __init__(self, coefficients: dict[tuple[str, int], float]) -> None:
        self._coefficients = coefficients

    @property
    def largest(self) -> float:
        if len(self._coefficients) == 1:  # no concatenation
            return next(iter(self._coefficients.values()))
        by_join: dict[str, list[float]] = {}
        for (join, _), coefficient in self._coefficients.items():
            by_join.setdefault(join, []).append(coefficient)
        return sum(math.hypot(*those) for those in by_join.values())

    def __add__(self, other: Lengths) -> Lengths:
        if not self._coefficients:
            return other
        total = dict(self._coefficients)
        for key, coefficient in other._coefficients.items():
            total[key] = total.get(key, 0.0) + coefficient
        return Lengths(total)

    def times(self, gain: float) -> Lengths:
        # 0 inf is 0 here: without a gradient, an infinite gain has no effect.
        return Lengths({key: c * gain for key, c in self._coefficients.items() if c > 0 and gain > 0})

    def piece(self, join: str, index: int) -> Lengths:
        """The bound for one input of a concatenation."""
        return Lengths({(join, index): self.largest})


_NOTHING = Lengths({})


def bounds_of(
    network: Network, loss_constant: float, *, effort: Effort = "spectral", limits: Mapping[str, float] | None = None
) -> Bounds:
    """The sensitivity of each parameter at the current weights, under add/remove of one example.

    Args:
        network: a traced model; see `trace`.
        loss_constant: the largest norm of one example's gradient at the model's output, which must be clipped to it.
        effort: how the norms of the weights are computed: "spectral", or "tight", which adds the operator norms of
            convolutions by Fourier transforms.
        limits: if given, bounds for any weights that are clipped to these norms (one per parameter; see
            `weights.limits_of`), instead of the current weights. They are the same in every step.
    """
    loss_constant = number("loss_constant", loss_constant, above=0)
    one_of("effort", effort, EFFORTS)
    norms = _allowed_norms(network, limits) if limits is not None else measured_norms(network, effort)
    return bounds_from(network, norms, loss_constant)


MeasuredNorms = dict[str, dict[str, float]]  # by operation


def bounds_from(network: Network, norms: MeasuredNorms, loss_constant: float) -> Bounds:
    """`bounds_of` from measured norms."""
    return _backward(network, norms, _forward(network, norms), loss_constant)


def measured_norms(network: Network, effort: Effort, operations: Iterable[Operation] | None = None) -> MeasuredNorms:
    """The norms of all weights, or of some operations, with one copy from the device."""
    rules = {op.name: op.rule for op in (network.operations if operations is None else operations)}
    wanted = {name: rule.measured(effort) for name, rule in rules.items()}
    values = iter(measured_together([one for some in wanted.values() for one in some.values()]))
    return {op: rules[op].joined({name: next(values) for name in some}) for op, some in wanted.items()}


def _allowed_norms(network: Network, limits: Mapping[str, float]) -> MeasuredNorms:
    """The largest norms of weights within the limits; frozen layers are measured."""
    found: MeasuredNorms = {}
    for op in network.operations:
        given = [limits[full] for full in op.parameters.values() if full in limits]
        if 0 < len(given) < len(op.parameters):
            raise ConfigurationError(
                f"Bounds from max_weight_norm alone (fixed=True) need layers that are trained or frozen as a whole, "
                f"and {op.where!r} is partly frozen: train all of it, freeze all of it, or use fixed=False."
            )
        if given:
            found[op.name] = op.rule.allowed(max(given))
        else:
            found |= measured_norms(network, "spectral", [op])
    return found


def _forward(network: Network, norms: MeasuredNorms) -> dict[str, Reach]:
    reaches = {network.input: Reach.of(network.input_shape)}
    for op in network.operations:
        reach = op.rule.largest([reaches[name] for name in op.inputs], norms[op.name])
        if not math.isfinite(reach.norm):
            raise UnsupportedModelError(
                f"Lipschitz bounds: values at {op.where!r} can be infinite. Its weights, or those before it, "
                "are not finite or too large: use a smaller learning rate or max_weight_norm."
            )
        reaches[op.name] = reach
    return reaches


def _backward(network: Network, norms: MeasuredNorms, reaches: Mapping[str, Reach], loss_constant: float) -> Bounds:
    arriving: dict[str, Lengths] = {network.output: Lengths({("loss", 0): loss_constant})}
    parameters: dict[str, Lengths] = {}
    for op in reversed(network.operations):
        gradient = arriving.setdefault(op.name, _NOTHING)
        inputs = [reaches[name] for name in op.inputs]
        for own, gain in op.rule.parameter_gains(inputs, norms[op.name]).items():
            name = op.parameters[own]
            parameters[name] = parameters.get(name, _NOTHING) + gradient.times(gain)
        gains = op.rule.gains(inputs, norms[op.name])
        for index, (name, gain) in enumerate(zip(op.inputs, gains, strict=True)):
            passed = gradient.piece(op.name, index) if op.rule.splits_gradient else gradient
            arriving[name] = arriving.get(name, _NOTHING) + passed.times(gain)
    sensitivities = {name: found.largest * _SLACK for name, found in parameters.items()}
    for name, bound in sensitivities.items():
        if not math.isfinite(bound):
            raise UnsupportedModelError(f"Lipschitz bounds: the gradient of {name!r} can be infinite.")
    return Bounds(
        sensitivities,
        {name: reach.norm for name, reach in reaches.items()},
        {name: found.largest * _SLACK for name, found in arriving.items()},
    )
