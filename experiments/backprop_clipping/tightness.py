"""How far each bound on a layer's gradient is above the gradient: bound / norm, layer by layer.

    python -m experiments.backprop_clipping.tightness --data FOLDER [--examples 64] [--seed 0]

The paper's networks at initialization, on training images: the median over examples, and the smallest ratio of all,
which must not fall below 1. "L12" is the paper's bound; "L2" is sqrt(cover) |x| |g|; "upstream" the smaller of the two;
"windows" is what bound="gradient" takes. For linear layers without positions all are exact. Without --data images are
random numbers.
"""

from __future__ import annotations

import argparse
import math
import os
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import data, layers, models
from clipwise.layers.clipped import unclipped
from clipwise.layers.clipped.convolution import Convolution
from clipwise.layers.clipped.scales import lengths

NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MNIST, as printed": ("mnist", "backprop_mnist", {}),
    "MNIST, padding and bias": ("mnist", "backprop_mnist", {"padding": True, "bias": True}),
    "CIFAR-10, stride 2": ("cifar10", "backprop_cifar10", {"pool_stride": 2, "padding": True, "bias": True}),
}
NO_LIMIT = 1e10  # nothing is clipped: bounds are compared with the gradient as it is


def ratios(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[str, list[float]]]:
    """By layer and bound: bound / norm of every example's gradient of the weights."""
    model = layers.clip_inputs(model, input_norm=NO_LIMIT, grad_norm=NO_LIMIT, bound="gradient")
    losses = F.cross_entropy(model(x), y, reduction="none")
    found: dict[str, dict[str, list[float]]] = {}

    def look(node: Any, g: Tensor) -> None:
        role = node.role
        seen, weight, _, _, lengths_BGP = node.saved_tensors
        inputs = role.map.of_input(seen)
        true = [
            float(role.map.pull_back(g[i : i + 1], seen[i : i + 1], weight, False, True)[1].norm())
            for i in range(len(g))
        ]
        mass_Bc = role.map.over_positions(g.abs())
        bounds = {
            "upstream": lengths(inputs) * role.map.upstream_norm(g, mass_Bc, inputs.shape),
            "windows": role.map.gradient_norm(g, lengths_BGP),
        }
        if isinstance(role.map, Convolution):
            most, cover = role.map.counts(tuple(inputs.shape[2:]))
            bounds["L12"] = math.sqrt(most) * lengths(inputs) * lengths(mass_Bc)
            bounds["L2"] = math.sqrt(cover) * lengths(inputs) * lengths(g)
        found[role.layer.name] = {
            kind: [float(b) / t for b, t in zip(bound, true, strict=True) if t > 0]
            for kind, bound in bounds.items()
        }

    with unclipped(look):
        torch.autograd.grad(losses.sum(), list(model.parameters()))
    return dict(reversed(found.items()))


def images(name: str, folder: str | None, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a training set, or random numbers."""
    looks = data.look(name)
    if folder is None:
        return torch.randn(count, looks.channels, looks.side, looks.side), torch.randint(0, 10, (count,))
    x, y = data.images(name, train=True, folder=folder)[:count]
    return looks.standardised(x), y


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("CLIPWISE_DATA"), help="the folder of the data sets")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = ("L12", "L2", "upstream", "windows")
    print(f"| network | layer | {' | '.join(kinds)} | smallest |")
    print("| --- | --- | " + "---: | " * (len(kinds) + 1))
    for title, (dataset, name, settings) in NETWORKS.items():
        torch.manual_seed(options.seed)
        model = models.build(name, **settings)
        x, y = images(dataset, options.data, options.examples)
        for layer, found in ratios(model, x, y).items():
            cells = [f"{median(found[kind]):.2f}" if kind in found else "" for kind in kinds]
            least = min(min(values) for values in found.values())
            print(f"| {title} | {layer} | {' | '.join(cells)} | {least:.4f} |")


if __name__ == "__main__":
    main()
