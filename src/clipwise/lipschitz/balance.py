"""Rescaling of consecutive layers, which keeps the network's function and reduces its bounds.

If all operations between two layers are positively homogeneous (ReLU, pooling, reshaping), a factor a can be moved:

    W_B h(W_A x + b_A) = (W_B / a) h(a W_A x + a b_A)

The function stays the same. The gradients of W_A and b_A, and their bounds S, are divided by a; those of W_B are
multiplied by a. With the optimal split the norm of the noise is proportional to sum_k S_k sqrt(d_k), so the best a
makes the terms T of both layers equal: a = sqrt(T_A / T_B). Factors are powers of two, so the multiplication is exact
and the outputs do not change by a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from clipwise.lipschitz.bounds import Bounds, Measured
from clipwise.lipschitz.trace import Network, Operation

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOMOGENEOUS = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Flatten, nn.Unflatten, nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_HOMOGENEOUS_CALLS = (F.relu, torch.relu, "relu", torch.flatten, "flatten", "view", "reshape")
_WORTH_IT = 0.75  # smallest |log2(a)| for which a factor of 2 helps
_SWEEPS = 50


class Pair(NamedTuple):
    """Two layers between which a factor can be moved."""

    first: Operation
    second: Operation


def pairs_of(network: Network, trained: Mapping[str, object]) -> list[Pair]:
    """All pairs of layers whose parameters are trained and used only once."""
    operations = {op.name: op for op in network.operations}

    def movable(node: fx.Node) -> bool:
        names = operations[node.name].parameters.values() if node.name in operations else ()
        return _is_module(network, node, _LAYERS) and all(network.uses[n] == 1 and n in trained for n in names)

    found = []
    for node in network.graph.graph.nodes:
        if not movable(node):
            continue
        following = _only_user(node)
        while following is not None and _is_homogeneous(network, following):
            following = _only_user(following)
        if following is not None and movable(following):
            found.append(Pair(operations[node.name], operations[following.name]))
    return found


@torch.no_grad()
def balance_(
    network: Network, pairs: list[Pair], bounds: Bounds, norms: Measured, limits: Mapping[str, float], norm: str
) -> dict[str, float]:
    """Rescale pairs of layers in place to reduce the sum of the bounds, within the limits of the weights.

    Updates `norms` as well. This is post-processing of released weights. Returns the factor of each changed parameter.
    """
    if not pairs:
        return {}
    parameters: dict[str, Tensor] = dict(network.graph.named_parameters(remove_duplicate=False))
    terms = {name: bound * math.sqrt(parameters[name].numel()) for name, bound in bounds.sensitivities.items()}
    lengths = {
        op.parameters[own]: length
        for op in {id(op): op for pair in pairs for op in (pair.first, pair.second)}.values()
        for own, length in op.rule.lengths(norms[op.name], norm).items()
    }
    powers = dict.fromkeys(lengths, 0)
    for _ in range(_SWEEPS):
        moved = False
        for pair in pairs:
            grows, shrinks = list(pair.first.parameters.values()), [pair.second.parameters["weight"]]
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


def noise_of(bounds: Bounds, network: Network) -> float:
    """sum_k S_k sqrt(d_k): the norm of the noise over z, for the optimal split with one group per parameter."""
    sizes = {name: p.numel() for name, p in network.graph.named_parameters(remove_duplicate=False)}
    return sum(bound * math.sqrt(sizes[name]) for name, bound in bounds.sensitivities.items())


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


def _is_homogeneous(network: Network, node: fx.Node) -> bool:
    if node.op in ("call_function", "call_method"):
        return node.target in _HOMOGENEOUS_CALLS and len(node.all_input_nodes) == 1
    return _is_module(network, node, _HOMOGENEOUS)


def _is_module(network: Network, node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> bool:
    return node.op == "call_module" and type(network.graph.get_submodule(str(node.target))) in kinds
