"""Bounds of what is applied to every number by itself, and of softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.lipschitz.reach import Reach
from clipwise.lipschitz.rule import Effort, Measurements, Norms, Rounding, Rule

# The largest slopes, rounded up. Those above 1 lie outside the flat and the linear parts of the function.
_GELU, _GELU_TANH, _SILU, _MISH = 1.128905, 1.129004, 1.099840, 1.088503
_HARDSIGMOID = 1 / 6 * (1 + 1e-7)  # torch has 1/6 in float32, also where it computes in float64
_LARGEST_EXPONENT = 80.0  # exp of it is a number in float32
_SELU = 1.0507009873554805 * 1.6732632423543773 * (1 + 1e-9)


Constants = tuple[float, float, float]  # slope, |f(0)|, the largest |f|


class ElementwiseRule(Rule):
    """y = f(x) with |f'| <= slope, |f(0)| = `at_zero` and |f| <= `most`: |y| <= slope |x| + sqrt(n) |f(0)|.

    A step, as in Hardshrink, does no harm where that holds as well: gradients never see it.
    """

    def __init__(self, constants: Constants, rounding: Rounding) -> None:
        self.slope, self.at_zero, self.most = constants
        self.rounding = rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        slack = 1 + self.rounding.of_elements
        slope, at_zero = self.slope * slack, self.at_zero * slack
        last = x.shape[-1] if x.shape else 1
        return Reach.of(
            x.shape,
            norm=slope * x.norm + math.sqrt(x.size) * at_zero,
            row=slope * x.row + math.sqrt(last) * at_zero,
            entry=min(slope * x.entry + at_zero, self.most * slack),
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self.slope * (1 + self.rounding.of_elements),)


class LearnedSlopeRule(Rule):
    """PReLU: y = x above 0 and a x below. |y| <= max(1, |a|) |x|; |da| <= |g| |x|."""

    def __init__(self, module: nn.PReLU, rounding: Rounding) -> None:
        self.module, self.rounding = module, rounding

    def measured(self, effort: Effort) -> Measurements:
        return {"weight": self.module.weight.detach().double().abs().amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"weight": limit}

    def limited(self, effort: Effort) -> Measurements:
        return self.measured(effort)

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,), (slope,) = reaches, self.gains(reaches, norms)
        return Reach.of(x.shape, slope * x.norm, slope * x.row, slope * x.entry)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (max(1.0, norms["weight"]) * (1 + self.rounding.of_elements),)

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        (x,) = reaches
        return {"weight": x.norm * (1 + self.rounding.of_sum(x.size))}


class SoftmaxRule(Rule):
    """Softmax along one dimension of d entries: its Jacobian diag(p) - p p^T has norm 1/2 at most; |p| <= 1."""

    def __init__(self, dim: int, rounding: Rounding) -> None:
        self.dim, self.rounding = dim, rounding

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        slack = 1 + self.rounding.of_sum(x.shape[self.dim])
        last = x.shape[-1] if self.dim in (-1, len(x.shape) - 1) else math.inf
        row = slack if last != math.inf else math.inf
        return Reach.of(x.shape, math.sqrt(x.size / x.shape[self.dim]) * slack, row, slack)

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        (x,) = reaches
        return (0.5 * (1 + 4 * self.rounding.of_sum(x.shape[self.dim])),)


def _fixed(slope: float, at_zero: float = 0.0, most: float = math.inf) -> Callable[[nn.Module], Constants]:
    return lambda module: (slope, at_zero, most)


def _clamped(module: nn.Module) -> Constants:
    assert isinstance(module, nn.Hardtanh)
    low, high = float(module.min_val), float(module.max_val)
    return 1.0, max(low, -high, 0.0), max(abs(low), abs(high))


def _celu(module: nn.Module) -> Constants:
    """Below 0 the slope is exp(x / alpha)."""
    assert isinstance(module, nn.CELU)
    if not module.alpha > 0:
        raise ConfigurationError(
            f"CELU with alpha={module.alpha} has no bounded slope: give a positive alpha."
        )
    return 1.0, 0.0, math.inf


def _softplus(module: nn.Module) -> Constants:
    """log(1 + exp(beta x)) / beta, or x itself above the threshold."""
    assert isinstance(module, nn.Softplus)
    if module.beta == 0:
        raise ConfigurationError("Softplus with beta=0 has no values: give another beta.")
    if module.threshold > _LARGEST_EXPONENT:
        raise ConfigurationError(
            f"Softplus with threshold={module.threshold:g} is infinite below it: give one of at most "
            f"{_LARGEST_EXPONENT:g}."
        )
    return 1.0, math.log(2) / abs(module.beta), math.inf


def constants_of(module: nn.Module) -> Constants:
    """Slope, |f(0)| and the largest |f| of an activation as it is set, or an error that says what is wrong."""
    for name, value in vars(module).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{name}={value} gives no bound: set a finite number.")
    return MODULES[type(module)](module)


MODULES: dict[type[nn.Module], Callable[..., Constants]] = {
    nn.ReLU: _fixed(1.0),
    nn.ReLU6: _fixed(1.0, most=6.0),
    nn.LeakyReLU: lambda m: (max(1.0, abs(m.negative_slope)), 0.0, math.inf),
    nn.RReLU: lambda m: (max(1.0, abs(m.lower), abs(m.upper)), 0.0, math.inf),
    nn.ELU: lambda m: (max(1.0, abs(m.alpha)), 0.0, math.inf),
    nn.CELU: _celu,
    nn.SELU: _fixed(_SELU),
    nn.GELU: lambda m: (_GELU_TANH if m.approximate == "tanh" else _GELU, 0.0, math.inf),
    nn.SiLU: _fixed(_SILU),
    nn.Mish: _fixed(_MISH),
    nn.Hardswish: _fixed(1.5),
    nn.Tanh: _fixed(1.0, most=1.0),
    nn.Hardtanh: _clamped,
    nn.Sigmoid: _fixed(0.25, at_zero=0.5, most=1.0),
    nn.Hardsigmoid: _fixed(_HARDSIGMOID, at_zero=0.5, most=1.0),
    nn.LogSigmoid: _fixed(1.0, at_zero=math.log(2)),
    nn.Softplus: _softplus,
    nn.Softsign: _fixed(1.0, most=1.0),
    nn.Tanhshrink: _fixed(1.0),
    nn.Softshrink: _fixed(1.0),
    nn.Hardshrink: _fixed(1.0),
    nn.Identity: _fixed(1.0),
}

# The same as functions with settings: the module, and the names of the arguments after the input.
WITH_SETTINGS: dict[object, tuple[type[nn.Module], tuple[str, ...]]] = {
    F.leaky_relu: (nn.LeakyReLU, ("negative_slope", "inplace")),
    F.elu: (nn.ELU, ("alpha", "inplace")),
    F.celu: (nn.CELU, ("alpha", "inplace")),
    F.gelu: (nn.GELU, ("approximate",)),
    F.softplus: (nn.Softplus, ("beta", "threshold")),
    F.hardtanh: (nn.Hardtanh, ("min_val", "max_val", "inplace")),
}

# And as functions or methods without any.
FUNCTIONS: dict[object, Constants] = {
    function: constants
    for functions, constants in (
        ((F.relu, torch.relu, "relu"), (1.0, 0.0, math.inf)),
        ((F.tanh, torch.tanh, "tanh"), (1.0, 0.0, 1.0)),
        ((F.sigmoid, torch.sigmoid, "sigmoid"), (0.25, 0.5, 1.0)),
        ((F.relu6,), (1.0, 0.0, 6.0)),
        ((F.selu, torch.selu), (_SELU, 0.0, math.inf)),
        ((F.silu,), (_SILU, 0.0, math.inf)),
        ((F.mish,), (_MISH, 0.0, math.inf)),
        ((F.hardswish,), (1.5, 0.0, math.inf)),
        ((F.softsign,), (1.0, 0.0, 1.0)),
        ((F.logsigmoid,), (1.0, math.log(2), math.inf)),
        ((torch.abs, "abs"), (1.0, 0.0, math.inf)),
    )
    for function in functions
}
