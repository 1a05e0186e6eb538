"""Weight clipping: each layer's weights within a norm of their own."""

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
# Of its limit: below, a weight is as good as 0, and its certified norm is mostly an allowance for rounding.
_LEAST = 1e-9
_ON = 1 - 1e-3  # of its limit: such a layer might do better with a larger one


def limits_of(network: Network, max_weight_norm: MaxWeightNorm) -> dict[str, float]:
    """C of each parameter: one for all, or by the name of a parameter or of the module that holds it."""
    names = list(dict.fromkeys(full for op in network.operations for full in op.parameters.values()))
    if not isinstance(max_weight_norm, Mapping):
        return dict.fromkeys(names, number("max_weight_norm", max_weight_norm, above=0))
    # The place of a layer in a Sequential is no name: keys are words.
    held = {key: [n for n in names if n == key or n.startswith(f"{key}.")] for key in max_weight_norm}
    for key, those in held.items():
        if not (isinstance(key, str) and those):
            raise ConfigurationError(
                f"max_weight_norm: {key!r} is no parameter or module with a bound. Give names of "
                f"{', '.join(map(repr, names))}, or of modules that hold them."
            )
    found: dict[str, float] = {}
    for name in names:
        given = [key for key, those in held.items() if name in those]
        if not given:
            raise ConfigurationError(
                f"max_weight_norm: give a number for {name!r}, or for the module that holds it."
            )
        found[name] = number("max_weight_norm", max_weight_norm[max(given, key=len)], above=0)
    return found


@torch.no_grad()
def clip_weights_(network: Network, limits: Mapping[str, float], norm: str = "spectral") -> dict[str, Tensor]:
    """Scale down, in place, each parameter whose norm is above its limit.

    A weight is clipped by its spectral or Frobenius norm (a convolution as a matrix c_out x (c_in k), a table of
    embeddings row by row), a bias by its length. This is post-processing of released values. For Frobenius
    norms it is the projection onto the ball; spectral scaling is not, and may stop short of an optimum.

    A parameter without a limit, because it is not trained, stays as it is.

    Returns:
        For each parameter its norm before over its limit, on its device: above 1 it was clipped. See `on_limit`.
    """
    one_of("norm", norm, NORMS)
    ratios = _clip_operations_(network, network.operations, limits, norm)
    return {
        name: torch.as_tensor(r, dtype=torch.float64, device=network.parameter(name).device)
        for name, r in ratios.items()
    }


@torch.no_grad()
def rescale_(network: Network, limits: Mapping[str, float], norm: str) -> dict[str, float]:
    """theta <- C theta / |theta| in place for every weight, whether its norm is above or below its limit C.

    Biases and other vectors are clipped to C, not scaled up: they begin at 0, and the paper's layers have none. Weights
    that are all 0 have no direction and stay 0. In a table of embeddings the longest row gets the norm C.

    Returns:
        Of each parameter its norm over its limit: 1 where it was rescaled, else what it was before.
    """
    return _clip_operations_(network, network.operations, limits, norm, rescales=True)


@torch.no_grad()
def clip_and_measure_(
    network: Network, limits: Mapping[str, float], norm: str, effort: Effort
) -> tuple[Measured, dict[str, float]]:
    """`clip_weights_`, and the norms of all weights afterwards, from one measurement wherever that will do.

    A weight W that is multiplied by f has norms f times as large, up to the rounding of f W. Parameters with another
    kind of clip, or with several uses, are clipped first and measured then.

    Returns:
        The norms, for `bounds_from`; and of each parameter its norm before over its limit.
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
            if limits[name] < length < math.inf:  # what is not finite is refused by whoever takes the bounds
                factors[own] = _goal(network.parameter(name), limits[name]) / length
                network.parameter(name).mul_(factors[own])
            ratios[name] = length / limits[name]
        if factors:
            # The factor is rounded, and then the product: by half a unit each.
            error = 2 * max(torch.finfo(network.parameter(op.parameters[own]).dtype).eps for own in factors)
            norms[op.name] = op.rule.scaled(norms[op.name], factors, error)
    return norms, ratios


def _is_shared(op: Operation, uses: Mapping[str, int], limits: Mapping[str, float]) -> bool:
    """Whether one measurement serves the clip and the bounds."""
    names = op.parameters.values()
    return op.rule.has_lengths and all(uses[name] == 1 and name in limits for name in names)


def _clip_operations_(
    network: Network,
    operations: Iterable[Operation],
    limits: Mapping[str, float],
    norm: str,
    rescales: bool = False,
) -> dict[str, float]:
    """Lengths of all are brought from the device in one go. A parameter with several uses has the largest of theirs."""
    effort: Effort = "frobenius" if norm == "frobenius" else "spectral"
    by_row: dict[str, Tensor] = {}
    wanted: list[tuple[str, bool, Tensor | Wanted]] = []
    for op in operations:
        if not any(name in limits for name in op.parameters.values()):
            continue
        for own, length in op.rule.limited(effort).items():
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
        if not is_row and limits[name] < found < math.inf:  # what is not finite is refused with the bounds
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
    """Bring weights to their limits, by the largest norm of their uses. Those that are there keep their bits."""
    for name, ratio in ratios.items():
        p = network.parameter(name)
        if p.ndim < 2 or not _LEAST < ratio < math.inf:
            continue
        goal = _goal(p, limits[name]) / limits[name]
        if not goal - (1 - goal) <= ratio <= 1:
            p.mul_(goal / ratio)
        ratios[name] = 1.0


def _or_nan(length: float) -> float:
    """As large as can be, if it is no number."""
    return math.inf if math.isnan(length) else length


def _goal(p: Tensor, limit: float) -> float:
    """A little below the limit, so that what was clipped is within: rounding adds eps |W|_F <= eps sqrt(rank) |W|."""
    rank = p.shape[0] if p.ndim else 1
    return limit * (1 - 4 * torch.finfo(p.dtype).eps * math.sqrt(rank))


def on_limit(ratios: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether each parameter sits on its limit. It follows from released values, and costs no privacy."""
    if not ratios:
        return {}
    values = torch.stack(list(ratios.values())).tolist()
    return {name: is_on_limit(value) for name, value in zip(ratios, values, strict=True)}


def is_on_limit(ratio: float) -> bool:
    """The same of a single norm over its limit."""
    return ratio >= _ON
