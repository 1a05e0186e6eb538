"""Normalization layers by name, and their placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from clipwise.validation.arguments import one_of

Norm = Callable[[int], nn.Module]
MOST_GROUPS = 32
FEWEST_WITHOUT_POSITIONS = 8  # values per group: a group of two would keep only a sign


def group_norm(channels: int) -> nn.Module:
    """Group normalization with gcd(32, channels / 2) equal groups: at most 32, each of two channels or more.

    A group of one channel would be a constant if one position is left.
    """
    return nn.GroupNorm(math.gcd(MOST_GROUPS, channels // 2 or 1), channels)


def unit_group_norm(units: int) -> nn.Module:
    """Group normalization behind a linear layer, with one value per unit: groups of eight or more, or a single one."""
    most = range(min(MOST_GROUPS, units // FEWEST_WITHOUT_POSITIONS), 0, -1)
    return nn.GroupNorm(next((g for g in most if units % g == 0), 1), units)


def layer_norm(channels: int) -> nn.Module:
    """Normalization over all channels and positions of an example, with a scale and a shift per channel."""
    return nn.GroupNorm(1, channels)


def no_norm(channels: int) -> nn.Module:
    """No normalization."""
    return nn.Identity()


# "batch" mixes the examples of a batch: only a strategy that allows it, such as `Batch`, can train such a model.
NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": group_norm, "layer": layer_norm, "none": no_norm}
_WITHOUT_POSITIONS: dict[str, Norm] = {"batch": nn.BatchNorm1d, "group": unit_group_norm}


def norm_of(name: str, *, positions: bool = True) -> Norm:
    """A function from channels to a norm, for images or, without `positions`, for the units of a linear layer."""
    one_of("norm", name, NORMS)
    return NORMS[name] if positions else _WITHOUT_POSITIONS.get(name, NORMS[name])


# The number of last trainable layers without a norm.
PLACEMENTS = {
    "every": 0,  # a norm behind each of them, the layer that gives the scores too
    "hidden": 1,  # none behind the scores, as networks usually are
    "mod": 2,  # the last one of these removed as well
}


def without_norm(placement: str) -> int:
    """The number of last layers without a norm."""
    one_of("placement", placement, PLACEMENTS)
    return PLACEMENTS[placement]


def normalized(plain: Sequence[nn.Module], norm: str, placement: str) -> nn.Sequential:
    """The layers in their order, with a norm right behind each linear and convolutional one.

    A bias in front of batch normalization has no effect but would be clipped and noised, so it is left out.

    Args:
        plain: layers, activations and pools.
        norm: by name; "none" leaves the layers as they are.
        placement: one of `PLACEMENTS`.
    """
    trainable = [m for m in plain if isinstance(m, (nn.Linear, nn.Conv2d))]
    followed = trainable[: len(trainable) - without_norm(placement)]
    found: list[nn.Module] = []
    for layer in plain:
        found.append(layer)
        if layer not in followed or norm == "none":
            continue
        if isinstance(layer, nn.Conv2d):
            found.append(norm_of(norm)(layer.out_channels))
        elif isinstance(layer, nn.Linear):
            found.append(norm_of(norm, positions=False)(layer.out_features))
        if norm == "batch":
            layer.register_parameter("bias", None)
    return nn.Sequential(*found)
