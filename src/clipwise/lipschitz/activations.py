"""Bounds of elementwise functions, of clipped inputs and of bounded normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.layers.bounded import BoundedGroupNorm
from clipwise.lipschitz.rule import Call, PlainRule, Reach, Rounding, Rule

# The largest slopes, rounded up.
_GELU, _GELU_TANH, _SILU, _MISH = 1.128905, 1.129004, 1.099840, 1.088503
_HARDSIGMOID = 1 / 6 * (1 + 1e-7)  # torch rounds 1/6 to float32, even in float64
_LARGEST_EXPONENT = 80.0  # its exp is finite in float32
_SELU = 1.0507009873554805 * 1.6732632423543773 * (1 + 1e-9)

SlopeBounds = tuple[float, float, float]  # slope, |f(0)|, the largest |f|


def elementwise_rule(constants: SlopeBounds, rounding: Rounding) -> Rule:
    """y = f(x) with |f'| <= slope, |f(0)| and the largest |f| as given: |y| <= slope |x| + sqrt(n) |f(0)|."""
    slack = 1 + rounding.of_elements
    gain, at_zero, most = (slack * c for c in constants)

    def bound(x: Reach) -> Reach:
        return Reach.of(
            x.shape,
            norm=gain * x.norm + math.sqrt(x.size) * at_zero,
            row=gain * x.row + math.sqrt(x.shape[-1] if x.shape else 1) * at_zero,
            entry=min(gain * x.entry + at_zero, most),
        )

    return PlainRule(bound, gain)


def activation_rule(call: Call) -> Rule:
    """The rule of an activation module."""
    try:
        return elementwise_rule(constants_of(call.target), call.rounding)
    except ConfigurationError as error:
        raise call.refusal(str(error).rstrip(".")) from None


def affine_rule(factor: float, rounding: Rounding, shift: float = 0.0) -> Rule:
    """The rule of c x + d, for public numbers c and d."""
    return elementwise_rule((abs(factor), abs(shift), math.inf), rounding)


def dropout_rule(call: Call) -> Rule:
    """Dropout in training: kept values are multiplied by 1 / (1 - p)."""
    p = call.target.p
    return affine_rule(1 / (1 - p) if p < 1 else 1.0, call.rounding)


def _fixed(slope: float, at_zero: float = 0.0, most: float = math.inf) -> Callable[[Any], SlopeBounds]:
    return lambda module: (slope, at_zero, most)


def _clamped(module: nn.Hardtanh) -> SlopeBounds:
    low, high = float(module.min_val), float(module.max_val)
    return 1.0, max(low, -high, 0.0), max(abs(low), abs(high))


def _softplus(module: nn.Softplus) -> SlopeBounds:
    """log(1 + exp(beta x)) / beta, or x above the threshold."""
    if module.beta == 0:
        raise ConfigurationError("Softplus with beta=0 is undefined: give another beta.")
    if module.threshold > _LARGEST_EXPONENT:
        raise ConfigurationError(
            f"Softplus with threshold={module.threshold:g} can overflow below it: give at most {_LARGEST_EXPONENT:g}."
        )
    return 1.0, math.log(2) / abs(module.beta), math.inf


def constants_of(module: nn.Module) -> SlopeBounds:
    """Slope, |f(0)| and the largest |f| of an activation; raises an error if it has no bound."""
    for name, value in vars(module).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{name}={value} gives no bound: set a finite number.")
    return MODULES[type(module)](module)


MODULES: dict[type[nn.Module], Callable[[Any], SlopeBounds]] = {
    nn.ReLU: _fixed(1.0),
    nn.ReLU6: _fixed(1.0, most=6.0),
    nn.LeakyReLU: lambda m: (max(1.0, abs(m.negative_slope)), 0.0, math.inf),
    nn.ELU: lambda m: (max(1.0, abs(m.alpha)), 0.0, math.inf),
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
    nn.Identity: _fixed(1.0),
}

# Equivalent functions and methods: the module, and the names of the arguments after the input.
FUNCTIONS: dict[object, tuple[type[nn.Module], tuple[str, ...]]] = {
    function: (kind, settings)
    for kind, functions, settings in (
        (nn.ReLU, (F.relu, torch.relu, "relu"), ()),
        (nn.Tanh, (F.tanh, torch.tanh, "tanh"), ()),
        (nn.Sigmoid, (F.sigmoid, torch.sigmoid, "sigmoid"), ()),
        (nn.ReLU6, (F.relu6,), ()),
        (nn.SELU, (F.selu, torch.selu), ()),
        (nn.SiLU, (F.silu,), ()),
        (nn.Mish, (F.mish,), ()),
        (nn.Hardswish, (F.hardswish,), ()),
        (nn.Softsign, (F.softsign,), ()),
        (nn.LogSigmoid, (F.logsigmoid,), ()),
        (nn.Identity, (torch.abs, "abs"), ()),  # |x| has the slope of x
        (nn.LeakyReLU, (F.leaky_relu,), ("negative_slope", "inplace")),
        (nn.ELU, (F.elu,), ("alpha", "inplace")),
        (nn.GELU, (F.gelu,), ("approximate",)),
        (nn.Softplus, (F.softplus,), ("beta", "threshold")),
        (nn.Hardtanh, (F.hardtanh,), ("min_val", "max_val", "inplace")),
    )
    for function in functions
}


def clip_input_rule(call: Call) -> Rule:
    """|y| <= C for any input; a projection onto a ball has slope at most 1."""
    reach = Reach.of(call.out, norm=call.target.max_norm * (1 + call.rounding.of_elements))
    return PlainRule(lambda x: reach, 1 + call.rounding.of_sum(math.prod(call.out)))


def bounded_norm_rule(call: Call) -> Rule:
    """(x - mu) / max(alpha, sigma) over groups of m entries.

    The Jacobian is a projection over max(alpha, sigma): |J| <= 1 / alpha. |y| <= min(sqrt(n), |x| / alpha). An entry is
    at most sqrt(m - 1), if it alone differs from the others.
    """
    module, alpha = call.target, float(call.target.alpha)
    if not (math.isfinite(alpha) and alpha > 0):  # the attribute may have been set
        raise call.refusal(f"alpha={module.alpha} gives no bound: set a positive, finite number")
    is_grouped = isinstance(module, BoundedGroupNorm)
    group = math.prod(call.out) // module.num_groups if is_grouped else math.prod(module.normalized_shape)
    error = call.rounding.of_sum(4 * group)
    slack, lost = 1 + error, error / alpha  # the rounding error of x - mu is relative to x

    def bound(x: Reach) -> Reach:
        return Reach.of(
            call.out,
            norm=min(slack * math.sqrt(x.size) + lost * x.norm, slack * x.norm / alpha),
            entry=min(slack * math.sqrt(group) + lost * x.norm, slack * 2 * x.entry / alpha),
        )

    return PlainRule(bound, slack / alpha)
