"""A small network with batch normalization in several shapes, its data, and public rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.layers.public_statistics import PublicStatistics
from clipwise.layers.replace_batchnorm import replace_batchnorm

SOUND = ("public", "self+public", "public-exact", "frozen", "group", "layer")
CLASSES = 3


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Batch normalization in two and in one dimension, with scales and shifts that are not trivial."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.Softplus(),
            nn.Flatten(),
            nn.Linear(24, 16),
            nn.BatchNorm1d(16),
            nn.Tanh(),
            nn.Linear(16, CLASSES),
        )
        for layer in model:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                nn.init.normal_(layer.weight, 1, 0.3)
                nn.init.normal_(layer.bias, 0, 0.3)
    return model.to(dtype)


def images(size: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=random, dtype=torch.float64).to(dtype)


def labels(size: int, seed: int = 1) -> Tensor:
    return torch.randint(0, CLASSES, (size,), generator=torch.Generator().manual_seed(seed))


def public(dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of another distribution than the private ones."""
    return 0.7 * images(12, dtype, seed=99) + 0.4


def sound(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, PublicStatistics]:
    return replace_batchnorm(network(dtype), public(dtype), kind)


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")
