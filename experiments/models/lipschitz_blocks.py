"""Pieces of networks whose gradients can be bounded by the norms of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from clipwise.layers.bounded_norm import BoundedGroupNorm
from clipwise.layers.clip_input import ClipInput
from clipwise.validation.arguments import one_of
from experiments.models.norms import MOST_GROUPS, group_norm, no_norm

KINDS = ("none", "group", "bounded")


def first_clip(input_norm: float | None) -> list[nn.Module]:
    """A visible clip of the inputs, if a norm is given."""
    return [] if input_norm is None else [ClipInput(input_norm)]


def norm_behind(kind: str, channels: int, groups: int, alpha: float) -> nn.Module:
    """The norm behind a layer.

    Args:
        kind: "none"; "group", with a scale and a shift to train; or "bounded": (x - mu) / max(alpha, sigma), without
            parameters, whose slope is at most 1 / alpha.
        channels: of its input.
        groups: at most so many, evenly, of two channels or more.
        alpha: the floor of "bounded".
    """
    if kind == "bounded":
        return BoundedGroupNorm(math.gcd(min(groups, MOST_GROUPS), channels // 2 or 1), channels, alpha)
    one_of("norm", kind, KINDS)
    return group_norm(channels) if kind == "group" else no_norm(channels)


def pooled_convolutions(
    inputs: int, channels: Sequence[int], norm: str, groups: int, alpha: float, last_pool: int = 2
) -> list[nn.Module]:
    """Convolutions of 3 x 3 that keep the size, each with its norm, ReLU and a mean pool behind it.

    Args:
        inputs: channels of the image.
        channels: of each convolution.
        norm, groups, alpha: see `norm_behind`.
        last_pool: the side of the last pool's window; that of the others is 2.
    """
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm_behind(norm, outputs, groups, alpha)]
        layers += [nn.ReLU(), nn.AvgPool2d(2)]
        inputs = outputs
    layers[-1] = nn.AvgPool2d(last_pool)
    return layers
