"""Weights that are drawn anew at each forward pass, to study how much noise a network bears."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipwise.errors import ConfigurationError
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.validation.arguments import require_module

_DRAWN = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
_KEPT = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
_MADE_BY_HOOKS = (
    "_g",
    "_v",
    "_orig",
)  # what weight_norm, spectral_norm and prune of torch.nn.utils leave behind


class NoisyWeights(nn.Module):
    """mu -> mu + std n with n ~ N(0, I), drawn anew whenever the weight is asked for, in evaluation too.

    The gradient of mu is that of the weight that was drawn.

    Guarantee:
        None: this noise is drawn by torch's ordinary generator, is the same for all examples of a batch and hides
        nobody. Examples stay apart, so private training around it keeps its own guarantee.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        is_number = isinstance(std, (int, float)) and not isinstance(std, bool)
        if not (is_number and math.isfinite(std) and std >= 0):
            raise ConfigurationError(f"std must be a finite number from 0 on, not {std!r}.")
        self.std = std

    def forward(self, mean: Tensor) -> Tensor:
        """A draw."""
        return mean + self.std * torch.randn_like(mean)

    def extra_repr(self) -> str:
        """For printing."""
        return f"std={self.std}"


def with_noisy_weights(model: nn.Module, std: float) -> nn.Module:
    """Let every linear, convolutional, recurrent and attention layer draw its weights from N(mu, std^2), in place.

    Biases, embeddings and normalization layers stay as they are. The trained parameters are the means mu, or what is
    behind them where weights are parametrized already. A second call gives the draws another std.
    """
    require_module(model)
    noise = NoisyWeights(std)
    for name, module in model.named_modules():
        if isinstance(module, PublicBatchNorm) and not module.is_frozen:
            raise ConfigurationError(
                f"Layer {name!r} ({type(module).__name__}): public statistics would be those of other draws of the "
                "weights than the batch meets. Use GroupNorm or LayerNorm, or BatchNorm without privacy."
            )
    weights = list(_weights_in(model))
    if not weights:
        raise ConfigurationError("model has no linear, convolutional, recurrent or attention layer.")
    for layer, key in weights:
        drawn = _drawn(layer, key)
        if drawn is None:
            parametrize.register_parametrization(layer, key, NoisyWeights(noise.std))
        else:
            drawn.std = noise.std
    return model


def _weights_in(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each weight that is to be drawn: its layer and its name there. Refuses weights that would not be."""
    for name, module in model.named_modules():
        if "parametrizations" in name.split(".") or isinstance(module, (*_KEPT, PublicBatchNorm)):
            continue  # what is behind a parametrization is reached by the layer that has it
        for key in _matrices_of(module):
            if not isinstance(module, _DRAWN) and _drawn(module, key) is None:
                raise ConfigurationError(
                    f"Parameter {key!r} of {name!r} ({type(module).__name__}) would stay without noise: it is no kind "
                    "of layer that is known here. Draw it too, with "
                    f"torch.nn.utils.parametrize.register_parametrization(layer, {key!r}, NoisyWeights(std))."
                )
            if key.endswith(_MADE_BY_HOOKS):
                raise ConfigurationError(
                    f"Layer {name!r} ({type(module).__name__}): a hook makes its weights of {key!r}, so that noise "
                    "would not be on the weights. Use weight_norm and spectral_norm of "
                    "torch.nn.utils.parametrizations, and make pruning permanent first."
                )
            yield module, key


def _matrices_of(layer: nn.Module) -> list[str]:
    """Parameters with two dimensions or more that are no biases, also where they are parametrized."""
    behind = getattr(layer, "parametrizations", {})
    names = [*(key for key, p in layer._parameters.items() if p is not None), *behind]
    return [key for key in names if "bias" not in key and getattr(layer, key).dim() > 1]


def _drawn(layer: nn.Module, key: str) -> NoisyWeights | None:
    """Where the draws of a weight come from, if it is drawn already."""
    if not parametrize.is_parametrized(layer, key):
        return None
    assert isinstance(layer.parametrizations, nn.ModuleDict)
    steps = layer.parametrizations[key].modules()
    return next((step for step in steps if isinstance(step, NoisyWeights)), None)
