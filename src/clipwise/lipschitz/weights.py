"""Weight clipping: each parameter has its own norm limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.lipschitz.batched_norms import Wanted, measured_together
from clipwise.lipschitz.bounds import Measured, measured_norms
from clipwise.lipschitz.rule import Effort
from clipwise.lipschitz.trace import Network, Operation
from clipwise.validation.arguments import number, one_of

MaxWeightNorm = float | Mapping[str, float]
NORMS = ("spectral", "frobenius")
# Fractions of a limit. Below the first, a weight counts as 0: its certified norm is mostly the rounding allowance.
_LEAST = 1e-9
_ON = 1 - 1e-3  # from here on a parameter counts as on its limit


def limits_of(network: Network, max_weight_norm: MaxWeightNorm) -> dict[str, float]:
    """The limit C of each parameter: one for all, or by the name of a parameter or of its module."""
    names = list(dict.fromkeys(full for op in network.operations for full in op.parameters.values()))
    if not isinstance(max_weight_norm, Mapping):
        return dict.fromkeys(names, number("max_weight_norm", max_weight_norm, above=0))
    # Keys must be strings, also for the layers of a Sequential.
    held = {key: [n for n in names if n == key or n.startswith(f"{key}.")] for key in max_weight_norm}
    for key, those in held.items():
        if not (isinstance(key, str) and those):
            raise ConfigurationError(
                f"max_weight_norm: {key!r} is no parameter or module with a bound. Give the names of "
                f"{', '.join(map(repr, names))}, or of their modules."
            )
    found: dict[str, float] = {}
    for name in names:
        given = [key for key, those in held.items() if name in those]
        if not given:
            raise ConfigurationError(f"max_weight_norm: give a number for {name!r}, or for its module.")
        found[name] = number("max_weight_norm", max_weight_norm[max(given, key=len)], above=0)
    return found


@torch.no_grad()
def clip_weights_(network: Network, limits: Mapping[str, float], norm: str = "spectral") -> dict[str, Tensor]:
    """Scale down, in place, each parameter whose norm is above its limit.

    Weights are clipped by their spectral or Frobenius norm (a convolution as a matrix c_out x (c_in k), an embedding
    table per row), biases by their L2 norm. This is post-processing of released values. With Frobenius norms it is the
    projection onto the ball. Spectral scaling is not, and training may stop short of an optimum.

    Parameters without a limit, because they are not trained, are not changed.

    Returns:
        Per parameter the ratio of its previous norm to its limit, on its device: above 1 it was clipped. See
            `on_limit`.
    """
    one_of("norm", norm, NORMS)
    ratios = _clip_operations_(network, network.operations, limits, norm)
    return {
        name: torch.as_tensor(r, dtype=torch.float64, device=network.parameter(name).device)
        for name, r in ratios.items()
    }


@torch.no_grad()
def rescale_(network: Network, limits: Mapping[str, float], norm: str) -> dict[str, float]:
    """theta <- C theta / |theta| in place for every weight, with C its limit.

    Biases and other vectors are clipped to C, not scaled up: they start at 0, and the paper's layers have none. Weights
    that are all 0 stay 0. In an embedding table the longest row gets the norm C.

    Returns:
        Per parameter the ratio of its norm to its limit: 1 if it was rescaled, else the previous ratio.
    """
    return _clip_operations_(network, network.operations, limits, norm, rescales=True)


@torch.no_grad()
def clip_and_measure_(
    network: Network, limits: Mapping[str, float], norm: str, effort: Effort
) -> tuple[Measured, dict[str, float]]:
    """`clip_weights_`, and the norms of all weights afterwards, from one measurement if possible.

    A weight W times f has f times its norms, up to the rounding of f W. Parameters with another kind of clip, or with
    several uses, are clipped first and then measured.

    Returns:
        The norms, for `bounds_from`; and per parameter the ratio of its previous norm to its limit.
    """
    trained = [op for op in network.operations if op.parameters]
    shared = [op for op in trained if _is_shared(op, network.uses, limits)]
    ratios: dict[str, float] = {}
    if len(shared) < len(trained):
        ratios = _clip_operations_(network, [op for op in trained if op not in shared], limits, norm)
    norms = measured_norms(network, effort)
    for op in shared:
        factors: dict[str, float] = {}
        for own, length in op.rule.lengths(norms[op.name], norm).items():
            name = op.parameters[own]
            if limits[name] < length < math.inf:  # non-finite norms are refused by `bounds_from`
                factors[own] = _goal(network.parameter(name), limits[name]) / length
                network.parameter(name).mul_(factors[own])
            ratios[name] = length / limits[name]
        if factors:
            # The factor and the product are rounded, by half a unit each.
            error = 2 * max(torch.finfo(network.parameter(op.parameters[own]).dtype).eps for own in factors)
            norms[op.name] = op.rule.scaled(norms[op.name], factors, error)
    return norms, ratios


def _is_shared(op: Operation, uses: Mapping[str, int], limits: Mapping[str, float]) -> bool:
    names = op.parameters.values()
    return op.rule.has_lengths and all(uses[name] == 1 and name in limits for name in names)


def _clip_operations_(
    network: Network, operations: Iterable[Operation], limits: Mapping[str, float], norm: str, rescales: bool = False
) -> dict[str, float]:
    """Copies all norms from the device at once. A parameter with several uses takes its largest norm."""
    by_row: dict[str, Tensor] = {}
    wanted: list[tuple[str, bool, Tensor | Wanted]] = []
    for op in operations:
        if not any(name in limits for name in op.parameters.values()):
            continue
        for own, length in op.rule.limited(norm).items():
            name = op.parameters[own]
            if name not in limits:
                continue
            if isinstance(length, Tensor) and length.ndim:
                by_row[name] = length
                wanted.append((name, True, length.amax()))
            else:
                wanted.append((name, False, length))
    ratios: dict[str, float] = {}
    factors: dict[str, float] = {}
    lengths = measured_together([one for _, _, one in wanted])
    for (name, is_row, _), found in zip(wanted, lengths, strict=True):
        ratios[name] = max(found / limits[name], ratios.get(name, 0.0), key=_or_nan)
        if rescales and network.parameter(name).ndim >= 2:
            continue
        if not is_row and limits[name] < found < math.inf:  # non-finite norms are refused by `bounds_from`
            goal = _goal(network.parameter(name), limits[name])
            factors[name] = min(goal / found, factors.get(name, 1.0))
    if rescales:
        _rescale_weights_(network, limits, ratios)
    for name, factor in factors.items():
        network.parameter(name).mul_(factor)
    for name, rows in by_row.items():
        if not rescales and limits[name] < ratios[name] * limits[name] < math.inf:
            p = network.parameter(name)
            rows = rows * (factors[name] * (1 + 4 * torch.finfo(p.dtype).eps) if name in factors else 1.0)
            p.mul_(torch.where(rows > limits[name], _goal(p, limits[name]) / rows, 1.0).to(p.dtype))
    return ratios


def _rescale_weights_(network: Network, limits: Mapping[str, float], ratios: dict[str, float]) -> None:
    """Scale weights to their limits, by the largest norm of their uses. Weights on their limit keep their bits."""
    for name, ratio in ratios.items():
        p = network.parameter(name)
        if p.ndim < 2 or not _LEAST < ratio < math.inf:
            continue
        goal = _goal(p, limits[name]) / limits[name]
        if not goal - (1 - goal) <= ratio <= 1:
            p.mul_(goal / ratio)
        ratios[name] = 1.0


def _or_nan(length: float) -> float:
    return math.inf if math.isnan(length) else length


def _goal(p: Tensor, limit: float) -> float:
    """Slightly below the limit, to allow for rounding: it adds eps |W|_F <= eps sqrt(rank) |W|."""
    rank = p.shape[0] if p.ndim else 1
    return limit * (1 - 4 * torch.finfo(p.dtype).eps * math.sqrt(rank))


def on_limit(ratios: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether each parameter is on its limit. This is a function of released values, and costs no privacy."""
    if not ratios:
        return {}
    values = torch.stack(list(ratios.values())).tolist()
    return {name: is_on_limit(value) for name, value in zip(ratios, values, strict=True)}


def is_on_limit(ratio: float) -> bool:
    """Whether a ratio of norm to limit is on the limit."""
    return ratio >= _ON
