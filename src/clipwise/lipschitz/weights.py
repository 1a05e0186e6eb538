"""Weight clipping: each parameter has its own norm limit. Balancing: factors move between layers.

Consecutive layers can be rescaled, which keeps the network's function and reduces its bounds. If all operations between
two layers are positively homogeneous (ReLU, pooling, reshaping), a factor a can be moved:

    W_B h(W_A x + b_A) = (W_B / a) h(a W_A x + a b_A)

The function stays the same. The gradients of W_A and b_A, and their bounds S, are divided by a; those of W_B are
multiplied by a. With the optimal split the norm of the noise is proportional to sum_k S_k sqrt(d_k), so the best a
makes the terms T of both layers equal: a = sqrt(T_A / T_B). Factors are powers of two, so the multiplication is exact
and the outputs do not change by a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.lipschitz.bounds import Bounds, MeasuredNorms, measured_norms
from clipwise.lipschitz.matrix_norms import Wanted, measured_together
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
def clip_weights_(network: Network, limits: Mapping[str, float], norm: str = "spectral") -> dict[str, float]:
    """Scale down, in place, each parameter whose norm is above its limit.

    Weights are clipped by their spectral or Frobenius norm (a convolution as a matrix c_out x (c_in k), an embedding
    table per row), biases by their L2 norm. This is post-processing of released values. Parameters without a limit,
    because they are not trained, are not changed.

    Returns:
        Per parameter the ratio of its previous norm to its limit: above 1 it was clipped. See `on_limit`.
    """
    one_of("norm", norm, NORMS)
    return _clip_operations_(network, network.operations, limits, norm)


@torch.no_grad()
def rescale_(network: Network, limits: Mapping[str, float], norm: str) -> dict[str, float]:
    """theta <- C theta / |theta| in place for every weight, with C its limit. Returns the ratios as `clip_weights_`.

    Biases and other vectors are clipped to C, not scaled up: they start at 0, and the paper's layers have none. Weights
    that are all 0 stay 0. In an embedding table the longest row gets the norm C. The ratio of a rescaled weight is 1.
    """
    return _clip_operations_(network, network.operations, limits, norm, rescales=True)


@torch.no_grad()
def clip_and_measure_(
    network: Network, limits: Mapping[str, float], norm: str, effort: Effort
) -> tuple[MeasuredNorms, dict[str, float]]:
    """`clip_weights_`, and the norms of all weights afterwards, from one measurement if possible.

    A weight W times f has f times its norms, up to the rounding of f W. Parameters with another kind of clip, or with
    several uses, are clipped first and then measured.

    Returns:
        The norms, for `bounds_from`; and per parameter the ratio of its previous norm to its limit.
    """
    trained = [op for op in network.operations if op.parameters]
    shared = [
        op
        for op in trained
        if op.rule.has_lengths and all(network.uses[name] == 1 and name in limits for name in op.parameters.values())
    ]
    ratios: dict[str, float] = {}
    if len(shared) < len(trained):
        ratios = _clip_operations_(network, [op for op in trained if op not in shared], limits, norm)
    norms = measured_norms(network, effort)
    for op in shared:
        factors: dict[str, float] = {}
        for own, length in op.rule.lengths(norms[op.name], norm).items():
            name = op.parameters[own]
            if limits[name] < length < math.inf:  # non-finite norms are refused by `bounds_from`
                factors[own] = _goal(network.parameters[name], limits[name]) / length
                network.parameters[name].mul_(factors[own])
            ratios[name] = length / limits[name]
        if factors:
            # The factor and the product are rounded, by half a unit each.
            error = 2 * max(torch.finfo(network.parameters[op.parameters[own]].dtype).eps for own in factors)
            norms[op.name] = op.rule.scaled(norms[op.name], factors, error)
    return norms, ratios


def _clip_operations_(
    network: Network, operations: Iterable[Operation], limits: Mapping[str, float], norm: str, rescales: bool = False
) -> dict[str, float]:
    """Copies all norms from the device at once. A parameter with several uses takes its largest norm."""
    by_row: dict[str, Tensor] = {}
    wanted: list[tuple[str, bool, Wanted]] = []
    for op in operations:
        if limits.keys().isdisjoint(op.parameters.values()):
            continue
        for own, length in op.rule.limited(norm).items():
            name = op.parameters[own]
            if name in limits and isinstance(length, Tensor) and length.ndim:
                by_row[name] = length
                wanted.append((name, True, length.amax()))
            elif name in limits:
                wanted.append((name, False, length))
    ratios: dict[str, float] = {}
    factors: dict[str, float] = {}
    lengths = measured_together([one for _, _, one in wanted])
    for (name, is_row, _), found in zip(wanted, lengths, strict=True):
        ratios[name] = max(found / limits[name], ratios.get(name, 0.0), key=lambda r: math.inf if math.isnan(r) else r)
        if rescales and network.parameters[name].ndim >= 2:
            continue
        if not is_row and limits[name] < found < math.inf:  # non-finite norms are refused by `bounds_from`
            goal = _goal(network.parameters[name], limits[name])
            factors[name] = min(goal / found, factors.get(name, 1.0))
    for name, ratio in ratios.items() if rescales else ():
        p = network.parameters[name]
        if p.ndim >= 2 and _LEAST < ratio < math.inf:
            goal = _goal(p, limits[name]) / limits[name]
            if not goal - (1 - goal) <= ratio <= 1:  # weights on their limit keep their bits
                p.mul_(goal / ratio)
            ratios[name] = 1.0
    for name, factor in factors.items():
        network.parameters[name].mul_(factor)
    for name, rows in by_row.items():
        if not rescales and limits[name] < ratios[name] * limits[name] < math.inf:
            p = network.parameters[name]
            rows = rows * (factors[name] * (1 + 4 * torch.finfo(p.dtype).eps) if name in factors else 1.0)
            p.mul_(torch.where(rows > limits[name], _goal(p, limits[name]) / rows, 1.0).to(p.dtype))
    return ratios


def _goal(p: Tensor, limit: float) -> float:
    """Slightly below the limit, to allow for rounding: it adds eps |W|_F <= eps sqrt(rank) |W|."""
    rank = p.shape[0] if p.ndim else 1
    return limit * (1 - 4 * torch.finfo(p.dtype).eps * math.sqrt(rank))


def on_limit(ratios: Mapping[str, float]) -> dict[str, bool]:
    """Whether each parameter is on its limit. This is a function of released values, and costs no privacy."""
    return {name: ratio >= _ON for name, ratio in ratios.items()}


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOMOGENEOUS = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Flatten, nn.Unflatten, nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_HOMOGENEOUS_CALLS = (F.relu, torch.relu, "relu", torch.flatten, "flatten", "view", "reshape")
_WORTH_IT = 0.75  # smallest |log2(a)| for which a factor of 2 helps
_SWEEPS = 50


Pair = tuple[Operation, Operation]  # two layers between which a factor can be moved


def pairs_of(network: Network, trained: Mapping[str, object]) -> list[Pair]:
    """All pairs of layers whose parameters are trained and used only once."""
    operations = {op.name: op for op in network.operations}

    def kind(node: fx.Node) -> type | None:
        return type(network.graph.get_submodule(str(node.target))) if node.op == "call_module" else None

    def movable(node: fx.Node) -> bool:
        names = operations[node.name].parameters.values() if node.name in operations else ()
        return kind(node) in _LAYERS and all(network.uses[n] == 1 and n in trained for n in names)

    def is_homogeneous(node: fx.Node) -> bool:
        if node.op in ("call_function", "call_method"):
            return node.target in _HOMOGENEOUS_CALLS and len(node.all_input_nodes) == 1
        return kind(node) in _HOMOGENEOUS

    found = []
    for node in network.graph.graph.nodes:
        if not movable(node):
            continue
        following = _only_user(node)
        while following is not None and is_homogeneous(following):
            following = _only_user(following)
        if following is not None and movable(following):
            found.append((operations[node.name], operations[following.name]))
    return found


@torch.no_grad()
def balance_(
    network: Network, pairs: list[Pair], bounds: Bounds, norms: MeasuredNorms, limits: Mapping[str, float], norm: str
) -> dict[str, float]:
    """Rescale pairs of layers in place to reduce the sum of the bounds, within the limits of the weights.

    Updates `norms` as well. This is post-processing of released weights. Returns the factor of each changed parameter.
    """
    if not pairs:
        return {}
    parameters = network.parameters
    terms = {name: bound * math.sqrt(parameters[name].numel()) for name, bound in bounds.sensitivities.items()}
    lengths = {
        op.parameters[own]: length
        for op in {id(op): op for pair in pairs for op in pair}.values()
        for own, length in op.rule.lengths(norms[op.name], norm).items()
    }
    powers = dict.fromkeys(lengths, 0)
    for _ in range(_SWEEPS):
        moved = False
        for first, second in pairs:
            grows, shrinks = list(first.parameters.values()), [second.parameters["weight"]]
            power = _best_power(grows, shrinks, terms, lengths, limits)
            for names, sign in ((grows, 1), (shrinks, -1)):
                for name in names:
                    powers[name] += sign * power
                    lengths[name] *= 2.0 ** (sign * power)
                    terms[name] /= 2.0 ** (sign * power)
            moved |= power != 0
        if not moved:
            break
    for op in network.operations:
        factors = {own: 2.0 ** powers[n] for own, n in op.parameters.items() if powers.get(n, 0) != 0}
        for own, factor in factors.items():
            parameters[op.parameters[own]].mul_(factor)
        if factors:
            norms[op.name] = op.rule.scaled(norms[op.name], factors, 0.0)
    return {name: 2.0**power for name, power in powers.items() if power != 0}


def _best_power(
    grows: list[str],
    shrinks: list[str],
    terms: Mapping[str, float],
    lengths: Mapping[str, float],
    limits: Mapping[str, float],
) -> int:
    """The power of two nearest to a = sqrt(T_A / T_B) within the limits of the weights; 0 if a is near 1."""
    first, second = sum(terms[n] for n in grows), sum(terms[n] for n in shrinks)
    if not (first > 0 and second > 0):
        return 0
    wanted = math.log2(first / second) / 2
    if abs(wanted) < _WORTH_IT:
        return 0
    slack = [math.log2(limits[n] / lengths[n]) for n in (grows if wanted > 0 else shrinks) if lengths[n] > 0]
    most = max(0, math.floor(min(slack, default=0.0) - 1e-6))
    return int(math.copysign(min(abs(round(wanted)), most), wanted))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
