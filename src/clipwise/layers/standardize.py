"""Weights with mean 0 and variance 1 for every output channel, as GroupNorm likes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, require_module


class StandardizedWeight(nn.Module):
    """w -> (w - mean) / sqrt(var + eps) over the inputs of each output channel, over sqrt(inputs).

    The last factor keeps an output's variance that of its inputs.

    Guarantee:
        A function of weights alone: examples stay apart, and per-example clipping bounds the gradient of the
        weights behind it as it does all others.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = number("eps", eps, least=0)

    def forward(self, weight: Tensor) -> Tensor:
        """Of the first axis' channels."""
        w_CI = weight.flatten(1)
        var_C1, mean_C1 = torch.var_mean(w_CI, 1, correction=0, keepdim=True)
        standard_CI = (w_CI - mean_C1) * ((var_C1 + self.eps) * w_CI.shape[1]).rsqrt()
        return standard_CI.view_as(weight)


def standardize_weights(model: nn.Module, eps: float = 1e-5) -> nn.Module:
    """Standardize the weights of every convolution, in place; the trained parameter becomes what is behind them.

    A parametrization of torch: `torch.nn.utils.parametrize.remove_parametrizations` leaves a plain layer. Only
    convolutions, since a normalization should follow, which the last linear layer seldom has.
    """
    require_module(model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    if not layers:
        raise ConfigurationError("model has no convolution whose weights could be standardized.")
    for name, layer in layers.items():
        if isinstance(layer, nn.modules.conv._ConvTransposeNd):
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) is transposed: its output channels are not the first axis. "
                "Standardize the other layers one by one with torch.nn.utils.parametrize and StandardizedWeight."
            )
        if parametrize.is_parametrized(layer, "weight") and _is_standardized(layer):
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) has standardized weights already. To change eps, call "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') first."
            )
        if layer.weight[0].numel() < 2:
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) has one weight an output channel, which would become 0. "
                "Leave it out: use torch.nn.utils.parametrize and StandardizedWeight on the other layers."
            )
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", StandardizedWeight(eps))
    return model


def _is_standardized(layer: nn.Module) -> bool:
    assert isinstance(layer.parametrizations, nn.ModuleDict)
    return any(isinstance(step, StandardizedWeight) for step in layer.parametrizations["weight"].modules())
