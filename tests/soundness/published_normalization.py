"""The scheme of the normalization paper, as a fixture: statistics of private and public rows together.

`python -m tests.soundness.published_normalization` prints the table of docs/papers/normalization.md: how far one
outlier moves the sum of gradients that are clipped at 1, in that scheme and in the sound kinds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipwise.layers import replace_batchnorm
from tests.layers.normalized import SOUND, losses_of
from tests.soundness.neighbours import distance

SIZES = ((64, 16), (64, 128), (256, 128))  # private rows, public rows


class Published(nn.Module):
    """Every normalization by the statistics of the batch and the public rows together, as in the paper."""

    def __init__(self, layers: nn.Sequential, rows: Tensor) -> None:
        super().__init__()
        self.layers, self.rows = layers, rows

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([x, self.rows])
        for layer in self.layers:
            h = _by_all_rows(layer, h) if hasattr(layer, "running_mean") else layer(h)
        return h[: len(x)]


def _by_all_rows(layer: nn.Module, h: Tensor) -> Tensor:
    axes, wide = [0, *range(2, h.dim())], [1, -1, *[1] * (h.dim() - 2)]
    var, mean = torch.var_mean(h, axes, correction=0, keepdim=True)
    return (h - mean) * (var + layer.eps).rsqrt() * layer.weight.view(wide) + layer.bias.view(wide)


class AffineOnly(nn.Module):
    """The affine part of a batch norm, which is not refused by its class."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.running_mean = norm.weight, norm.bias, norm.eps, None


def published(layers: nn.Sequential, rows: Tensor) -> nn.Module:
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layers[place] = AffineOnly(layer)
    return Published(layers, rows)


def clipped_one_by_one(model: nn.Module, x: Tensor, y: Tensor, max_norm: float = 1.0) -> dict[str, Tensor]:
    """sum_i clip(grad of loss_i), by autograd through the whole batch."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = {name: torch.zeros_like(p) for name, p in zip(names, parameters, strict=True)}
    losses = losses_of(model, x, y)
    for loss in losses:
        gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for name, g in zip(names, gradient, strict=True):
            total[name] += g * (max_norm / norm).clamp(max=1)
    return total


def tanh_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).double()


def moved_by_an_outlier(build: Callable[[nn.Sequential, Tensor], nn.Module], size: int, rows: int) -> float:
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(size, 10, generator=random).double(), torch.zeros(size, dtype=torch.long)
    x[0] = 1e5
    model = build(tanh_network(), torch.randn(rows, 10, generator=random).double())
    return distance(clipped_one_by_one(model, x, y), clipped_one_by_one(model, x[1:], y[1:]))


def moved_by_kind(kind: str, size: int, rows: int) -> float:
    return moved_by_an_outlier(lambda layers, public: replace_batchnorm(layers, public, kind)[0], size, rows)


def main() -> None:
    """Print the table."""
    print("| batch | public rows | sum moves by, together | every kind above, at most |")
    print("|---:|---:|---:|---:|")
    for size, rows in SIZES:
        together = moved_by_an_outlier(published, size, rows)
        apart = max(moved_by_kind(kind, size, rows) for kind in SOUND)
        print(f"| {size} | {rows} | {together:.1f} | {apart:.3f} |", flush=True)


if __name__ == "__main__":
    main()
