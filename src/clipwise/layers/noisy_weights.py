"""Weights that are drawn anew at each forward pass, to study how much noise a network bears."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipwise.errors import ConfigurationError
from clipwise.layers.public_batchnorm import PublicBatchNorm

_KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)


class NoisyWeights(nn.Module):
    """mu -> mu + std n with n ~ N(0, I), drawn anew whenever the weight is asked for, in evaluation too.

    The gradient of mu is that of the weight that was drawn.

    Guarantee:
        None: this noise is drawn by torch's ordinary generator, is the same for all examples of a batch and hides
        nobody. Examples stay apart, so private training around it keeps its own guarantee.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, mean: Tensor) -> Tensor:
        """A draw."""
        return mean + self.std * torch.randn_like(mean)

    def extra_repr(self) -> str:
        """For printing."""
        return f"std={self.std}"


def with_noisy_weights(model: nn.Module, std: float) -> nn.Module:
    """Let every linear, convolutional and recurrent layer draw its weights from N(mu, std^2), in place.

    Biases and normalization layers stay as they are. The trained parameters are the means mu.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigurationError(f"std must be a finite number from 0 on, not {std!r}.")
    for name, module in model.named_modules():
        if isinstance(module, PublicBatchNorm) and not module.is_frozen:
            raise ConfigurationError(
                f"Layer {name!r} ({type(module).__name__}): public statistics would be those of other draws of the "
                "weights than the batch meets. Use GroupNorm or LayerNorm, or BatchNorm without privacy."
            )
    layers = [m for m in model.modules() if isinstance(m, _KINDS)]
    if not layers:
        raise ConfigurationError("model has no linear, convolutional or recurrent layer.")
    for layer in layers:
        for name in [n for n, _ in layer.named_parameters(recurse=False) if n.startswith("weight")]:
            parametrize.register_parametrization(layer, name, NoisyWeights(std))
    return model
