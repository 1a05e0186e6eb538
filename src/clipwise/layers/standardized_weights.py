"""Standardized weights of convolutions, for use with GroupNorm.

C: output channels, I: inputs of a channel.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number, require_module


class StandardizedWeight(nn.Module):
    """w -> (w - mean) / sqrt(n (var + eps)), with mean and variance over the n inputs of each output channel.

    The factor 1 / sqrt(n) keeps the variance of an output equal to that of its inputs.

    Guarantee:
        A function of weights alone: examples are not mixed, and per-example clipping bounds the gradient of the
        underlying weights like any other.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = number("eps", eps, least=0)

    def forward(self, weight: Tensor) -> Tensor:
        w_CI = weight.flatten(1)
        inputs = w_CI.shape[1]
        # Layer normalization is one operation, and so is its batched backward pass. Separate operations would pass
        # through the memory of all per-example gradients about ten times.
        scale_I = w_CI.new_full((inputs,), inputs**-0.5)
        return F.layer_norm(w_CI, (inputs,), scale_I, eps=self.eps).view_as(weight)


def standardize_weights(model: nn.Module, eps: float = 1e-5) -> nn.Module:
    """Standardize the weights of every convolution, in place. The trained parameter is the underlying weight.

    This registers a torch parametrization; `torch.nn.utils.parametrize.remove_parametrizations` restores a plain layer.
    Only convolutions are changed, because a normalization layer should follow, and the last linear layer seldom has
    one.
    """
    require_module(model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    if not layers:
        raise ConfigurationError("model has no convolution whose weights could be standardized.")
    for name, layer in layers.items():
        if isinstance(layer, nn.modules.conv._ConvTransposeNd) or layer.weight[0].numel() < 2:
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) is transposed, or has one weight per output channel, which "
                "would become 0: use torch.nn.utils.parametrize and StandardizedWeight on the other layers."
            )
        if parametrize.is_parametrized(layer, "weight") and any(
            isinstance(step, StandardizedWeight)
            for step in layer.parametrizations["weight"].modules()  # type: ignore[union-attr,index]
        ):
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) has standardized weights already. To change eps, first call "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
            )
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", StandardizedWeight(eps))
    return model
