"""Weights that are drawn at each forward pass, to study how much noise a network tolerates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipwise.errors import ConfigurationError
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.validation.arguments import number, require_module

_CELLS = (nn.RNNBase, nn.RNNCellBase)
_DRAWN = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, *_CELLS, nn.MultiheadAttention)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, PublicBatchNorm)
_KEPT = (nn.Embedding, nn.EmbeddingBag, *_NORMS)
_MADE_BY_HOOKS = ("_g", "_v", "_orig")  # by weight_norm, spectral_norm and prune of torch.nn.utils


class NoisyWeights(nn.Module):
    """mu -> mu + std n with n ~ N(0, I), drawn at each access of the weight, in evaluation too.

    The gradient of mu is that of the drawn weight.

    Guarantee:
        None. This noise comes from torch's ordinary generator, is the same for all examples of a batch and protects no
        example. Examples are not mixed, so private training with these weights keeps its own guarantee.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = number("std", std, least=0)

    def forward(self, mean: Tensor) -> Tensor:
        return mean + self.std * torch.randn_like(mean)

    def extra_repr(self) -> str:
        return f"std={self.std}"


def with_noisy_weights(model: nn.Module, std: float) -> nn.Module:
    """Draw the weights of every linear, convolutional, recurrent and attention layer from N(mu, std^2), in place.

    Biases, embeddings and normalization layers do not change. The trained parameters are the means mu, or the
    underlying parameters where weights are already parametrized. A second call changes std.
    """
    require_module(model)
    noise = NoisyWeights(std)
    for name, module in model.named_modules():
        if isinstance(module, PublicBatchNorm) and not module.is_frozen:
            raise ConfigurationError(
                f"Layer {name!r} ({type(module).__name__}): the public statistics would come from other draws of "
                "the weights than the batch uses. Use GroupNorm or LayerNorm, or BatchNorm without privacy."
            )
    weights = list(_weights_in(model))
    if not weights:
        raise ConfigurationError("model has no linear, convolutional, recurrent or attention layer.")
    for layer, key in weights:
        drawn = _noise_of(layer, key)
        if drawn is None:
            parametrize.register_parametrization(layer, key, NoisyWeights(noise.std))
        else:
            drawn.std = noise.std
    return model


def _weights_in(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layer and name of each weight to draw. Refuses weights that would get no noise."""
    for name, module in model.named_modules():
        if "parametrizations" in name.split(".") or isinstance(module, _KEPT):
            continue  # the layer itself yields its parametrized weights
        for key in _matrices_of(module):
            if not isinstance(module, _DRAWN) and _noise_of(module, key) is None:
                raise ConfigurationError(
                    f"Parameter {key!r} of {name!r} ({type(module).__name__}) would stay without noise: this kind "
                    "of layer is not supported. Draw it too, with "
                    f"torch.nn.utils.parametrize.register_parametrization(layer, {key!r}, NoisyWeights(std))."
                )
            if key.endswith(_MADE_BY_HOOKS):
                raise ConfigurationError(
                    f"Layer {name!r} ({type(module).__name__}): a hook makes its weights of {key!r}, so the noise "
                    "would not be added to the weights. Use weight_norm and spectral_norm of "
                    "torch.nn.utils.parametrizations, and make pruning permanent first."
                )
            yield module, key


def _matrices_of(layer: nn.Module) -> list[str]:
    """Parameters with at least two dimensions that are not biases, parametrized or not."""
    behind = getattr(layer, "parametrizations", {})
    names = [*(key for key, p in layer._parameters.items() if p is not None), *behind]
    return [key for key in names if "bias" not in key and getattr(layer, key).dim() > 1]


def _noise_of(layer: nn.Module, key: str) -> NoisyWeights | None:
    if not parametrize.is_parametrized(layer, key):
        return None
    assert isinstance(layer.parametrizations, nn.ModuleDict)
    return next((step for step in layer.parametrizations[key].modules() if isinstance(step, NoisyWeights)), None)
