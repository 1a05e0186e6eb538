"""Training a few parameters of a network: only its biases, only low-rank additions, only its head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError

RANK = 8
# The layers that get a low-rank addition, by the last part of their names: attention's query and value.
_ADAPTED = ("query", "value")


class LowRankLinear(nn.Module):
    """A frozen linear layer beside a trained one of low rank: y = x W^T + b + s (x A^T) B^T, s = 1 / r.

    B starts at zero, so at first only B has a nonzero gradient. The time of a step does not depend on that.
    """

    def __init__(self, frozen: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))
        self.scale = 1.0 / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up) * self.scale  # type: ignore[no-any-return]


def train_only(model: nn.Module, what: str) -> nn.Module:
    """Freeze all parameters of the model except the selected ones.

    Args:
        model: a network of this package.
        what: "all" (changes nothing), "biases", "lora" (adds low-rank layers to query and value) or "head".
    """
    if what == "all":
        return model
    if what not in ("biases", "lora", "head"):
        raise ConfigurationError(f"trained={what!r} is not known: use 'all', 'biases', 'lora' or 'head'.")
    model.requires_grad_(False)
    if what == "lora":
        _add_low_rank(model)
    for name, parameter in model.named_parameters():
        chosen = {
            "biases": name.endswith("bias"),
            "lora": name.endswith((".down", ".up")),
            "head": name.startswith("head."),
        }
        parameter.requires_grad_(chosen[what])
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError(f"trained={what!r} leaves nothing to train in this network: use another.")
    return model


def _add_low_rank(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in _ADAPTED and isinstance(layer, nn.Linear):
                setattr(parent, name, LowRankLinear(layer))
