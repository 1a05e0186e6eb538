"""Weight clipping: each layer's weights within a norm of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.lipschitz.rule import Effort
from clipwise.lipschitz.trace import Network

MaxWeightNorm = float | Mapping[str, float]
NORMS = ("spectral", "frobenius")
_ON = 1 - 1e-3  # of its limit: such a layer might do better with a larger one


def limits_of(network: Network, max_weight_norm: MaxWeightNorm) -> dict[str, float]:
    """C of each parameter: one for all, or by the name of a parameter or of the module that holds it."""
    names = [full for op in network.operations for full in op.parameters.values()]
    if not isinstance(max_weight_norm, Mapping):
        _require_positive(max_weight_norm)
        return dict.fromkeys(names, float(max_weight_norm))
    found: dict[str, float] = {}
    for name in dict.fromkeys(names):
        given = [key for key in max_weight_norm if name == key or name.startswith(key + ".")]
        if not given:
            raise ConfigurationError(
                f"max_weight_norm: give a number for {name!r}, or for the module that holds it."
            )
        closest = max(given, key=len)
        _require_positive(max_weight_norm[closest])
        found[name] = float(max_weight_norm[closest])
    unknown = [key for key in max_weight_norm if not any(n == key or n.startswith(key + ".") for n in names)]
    if unknown:
        raise ConfigurationError(f"max_weight_norm: {unknown[0]!r} is no parameter or module with a bound.")
    return found


@torch.no_grad()
def clip_weights_(network: Network, limits: Mapping[str, float], norm: str = "spectral") -> dict[str, Tensor]:
    """Scale down, in place, each parameter whose norm is above its limit.

    A weight is clipped by its spectral or Frobenius norm (a convolution as a matrix c_out x (c_in k), a table of
    embeddings row by row), a bias by its length. This is post-processing of released values. For Frobenius
    norms it is the projection onto the ball; spectral scaling is not, and may stop short of an optimum.

    Returns:
        For each parameter its norm before over its limit, on its device: above 1 it was clipped. See `on_limit`.
    """
    if norm not in NORMS:
        raise ConfigurationError(f"norm={norm!r} is not known: use one of {', '.join(map(repr, NORMS))}.")
    effort: Effort = "frobenius" if norm == "frobenius" else "spectral"
    parameters = dict(network.graph.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for op in network.operations:
        for own, length in op.rule.limited(effort).items():
            name = op.parameters[own]
            p = parameters[name]
            # Rounding adds at most eps |W|_F <= eps sqrt(rank) |W|.
            rank = p.shape[0] if p.ndim else 1
            goal = limits[name] * (1 - 4 * torch.finfo(p.dtype).eps * math.sqrt(rank))
            scale = (goal / length).clamp(max=1)
            p.mul_(torch.where(length > goal, scale, 1.0).to(p.dtype))
            ratio = length.amax() / limits[name]
            found[name] = torch.maximum(found[name], ratio) if name in found else ratio
    return found


def on_limit(ratios: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether each parameter sits on its limit. It follows from released values, and costs no privacy."""
    if not ratios:
        return {}
    values = torch.stack(list(ratios.values())).tolist()
    return {name: value >= _ON for name, value in zip(ratios, values, strict=True)}


def _require_positive(value: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise ConfigurationError(f"max_weight_norm must be a positive, finite number, not {value!r}.")
