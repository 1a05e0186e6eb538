"""Two linear layers, for tables."""

from __future__ import annotations

from torch import nn

from experiments.models.lipschitz_blocks import first_clip, norm_behind


def mlp2(
    classes: int = 2,
    *,
    features: int,
    hidden: int = 16,
    norm: str = "none",
    input_norm: float | None = None,
    groups: int = 8,
    alpha: float = 0.5,
) -> nn.Sequential:
    """The network for tables of Barczewski and Ramon (2024), who say two layers and 140 to 2,120 parameters.

    The width is ours: hidden (features + 1) + classes (hidden + 1) parameters.

    Args:
        classes: the number of outputs.
        features: the number of inputs.
        hidden: the width between the layers.
        norm: behind the first layer: "none", "group" or "bounded".
        input_norm: begin with a clip of the inputs to this norm.
        groups: of the norm.
        alpha: the floor under the deviation, for "bounded".
    """
    return nn.Sequential(
        *first_clip(input_norm),
        nn.Linear(features, hidden),
        norm_behind(norm, hidden, groups, alpha),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
