"""A plain stack of layers, with a norm behind each trainable one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from clipwise.validation.arguments import one_of
from experiments.models.norms import norm_of

# How many of the last trainable layers have no norm behind them.
PLACEMENTS = {
    "every": 0,  # a norm behind each of them, the layer that gives the scores too
    "hidden": 1,  # none behind the scores, as networks usually are
    "mod": 2,  # the last one of these removed as well
}


def without_norm(placement: str) -> int:
    """How many layers at the end have no norm."""
    one_of("placement", placement, PLACEMENTS)
    return PLACEMENTS[placement]


def normalized(plain: Sequence[nn.Module], norm: str, placement: str) -> nn.Sequential:
    """The layers in their order, with a norm right behind each linear and convolutional one.

    A bias in front of batch normalization changes nothing, yet would be clipped and noised: it is left out.

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
