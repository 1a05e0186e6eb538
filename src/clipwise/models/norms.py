"""The normalization of a model, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from clipwise.errors import ConfigurationError

Norm = Callable[[int], nn.Module]
MOST_GROUPS = 32


def group_norm(channels: int) -> nn.Module:
    """Group normalization with gcd(32, channels / 2) groups: at most 32, evenly, of two channels or more.

    A group of one channel would be a constant where one position is left.
    """
    return nn.GroupNorm(math.gcd(MOST_GROUPS, channels // 2 or 1), channels)


def no_norm(channels: int) -> nn.Module:
    """The layer is left out."""
    return nn.Identity()


# "batch" mixes the examples of a batch: only a strategy that allows it, such as `Batch`, can train such a model.
NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": group_norm, "none": no_norm}


def norm_of(name: str) -> Norm:
    """From channels to a layer."""
    if name not in NORMS:
        raise ConfigurationError(f"norm={name!r} is not known: use one of {', '.join(map(repr, NORMS))}.")
    return NORMS[name]
