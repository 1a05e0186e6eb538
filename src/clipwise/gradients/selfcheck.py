"""A new graph is compared with plain autograd before anything is released.

A rule that reads torch's saved tensors wrongly, or a user's own rule with a mistake in it, would be wrong
for every example. One example whose gradient is not all rounding decides, of three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.examples import Parameters, PerExampleGradients
from clipwise.gradients.forms import roundoff
from clipwise.gradients.plain import single
from clipwise.randomness import private_generator

# A norm of a single number, say, is all rounding, divided by a small epsilon. But no precision excuses more than a
# thousandth of what arrives.
_ROUNDING, _MOST_ROUNDING = 1e3, 1e-3
_UNDERFLOW = 1e-30  # gradients so short may have lost their digits on the way


def check(
    result: PerExampleGradients, losses: Tensor, parameters: Parameters, arriving: Callable[[int], float]
) -> None:
    """Raise unless some example's gradient is the true one.

    `arriving` gives the largest gradient that arrives at a use from an example: rounding scales with it.
    """
    disagreed = ""
    for i in torch.randperm(len(losses), generator=private_generator())[:3].tolist():
        truth = single(losses, i, parameters)
        rounding = min(_ROUNDING * roundoff(losses.dtype), _MOST_ROUNDING) * arriving(i)
        name = _disagreement(result, losses, i, truth, parameters, rounding)
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
    rounding: float,
) -> str | None:
    """A parameter whose gradient is not the true one, up to rounding."""
    thrice = single(losses, example, parameters, weight=3)
    ours = result.instantiate(slice(example, example + 1))
    # Where terms cancel, rounding is large beside the result: three times the loss rounds otherwise.
    noise = max(_norm(thrice[name] / 3 - t) for name, t in truth.items())
    # In bfloat16 that already is half a per cent.
    noise *= 100 if roundoff(losses.dtype) < 1e-6 else 10
    rounding += 1e-5 * max(result.mass(example), *map(_norm, truth.values())) + noise + _UNDERFLOW
    for name, t in truth.items():
        if _norm(ours[name][0] - t) > 1e-2 * _norm(t) + rounding:  # False for NaN: it will be muted anyway
            return name
    return None


def _norm(t: Tensor) -> float:
    return float(t.double().norm())
