"""The ratio of each bound on a layer's gradient to the gradient norm, for each layer.

    python -m experiments backprop-clipping/tightness --data FOLDER [--examples 64] [--seed 0] [--out FILE]

First the paper's networks at initialization, on training images: the median over examples, and the smallest ratio of
all, which must not fall below 1. "L12" is the paper's bound; "L2" is sqrt(cover) |x| |g|; "upstream" the smaller of the
two; "windows" is the bound of bound="gradient". For linear layers without positions all are exact. Without --data
images are random numbers.

Then every kind of layer and each of its parameters, on random inputs and upstream gradients, which are far from the
worst case. In mode "normalize" one example's gradient is (1 - 2^-10) C |dW| / n, so that it shows n / |dW|.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import layers
from clipwise.layers.clipped import unclipped
from clipwise.layers.clipped.layer import AIM, lengths
from clipwise.layers.clipped.linear import Convolution
from clipwise.layers.clipped.linear_map import Seen
from experiments import data, models
from experiments.harness.command import parser_of
from experiments.harness.environment import environment

NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MNIST, as printed": ("mnist", "backprop_mnist", {}),
    "MNIST, padding and bias": ("mnist", "backprop_mnist", {"padding": True, "bias": True}),
    "CIFAR-10, stride 2": ("cifar10", "backprop_cifar10", {"pool_stride": 2, "padding": True, "bias": True}),
}
NO_LIMIT = 1e10  # nothing is clipped: bounds are compared with the gradient as it is


def ratios(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[str, list[float]]]:
    """For each layer and bound: bound / norm of the weight gradient of every example."""
    model = layers.clip_inputs(model, input_norm=NO_LIMIT, grad_norm=NO_LIMIT, bound="gradient")
    losses = F.cross_entropy(model(x), y, reduction="none")
    found: dict[str, dict[str, list[float]]] = {}

    def look(node: Any, g: Tensor) -> None:
        role = node.role
        *kept, weight = node.saved_tensors
        seen, _, _, lengths_BGP = Seen(*kept)
        inputs = role.map.of_input(seen)
        true = [
            float(role.map.pull_back(g[i : i + 1], seen[i : i + 1], weight, False, True)[1].norm())
            for i in range(len(g))
        ]
        mass_Bc = role.map.over_positions(g.abs())
        bounds = {
            "upstream": lengths(inputs) * role.map.upstream_norm(g, mass_Bc, inputs.shape),
            "windows": role.map.gradient_norm(g.abs(), lengths_BGP),
        }
        if isinstance(role.map, Convolution):
            most, cover = role.map.counts(tuple(inputs.shape[2:]))
            bounds["L12"] = math.sqrt(most) * lengths(inputs) * lengths(mass_Bc)
            bounds["L2"] = math.sqrt(cover) * lengths(inputs) * lengths(g)
        found[role.layer.name] = {
            kind: [float(b) / t for b, t in zip(bound, true, strict=True) if t > 0] for kind, bound in bounds.items()
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


class Attention(nn.Module):
    """Self-attention, as a function of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


# The layer, and the shape of an input without the axis of examples; a number of ids where inputs are ids.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "Linear": (lambda: nn.Linear(20, 10), (20,), 0),
    "Linear, 16 positions": (lambda: nn.Linear(20, 10), (16, 20), 0),
    "Conv1d": (lambda: nn.Conv1d(4, 8, 5, padding=2), (4, 32), 0),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3, padding=1), (4, 12, 12), 0),
    "Conv2d, reflect": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 12, 12), 0),
    "Conv2d, replicate": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="replicate"), (4, 12, 12), 0),
    "Conv2d, circular": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (4, 12, 12), 0),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (2, 6, 6, 6), 0),
    "Embedding, 32 of 1,000 ids": (lambda: nn.Embedding(1000, 16), (32,), 1000),
    "Embedding, 32 of 10 ids": (lambda: nn.Embedding(10, 16), (32,), 10),
    "LayerNorm, 16 positions": (lambda: nn.LayerNorm(20), (16, 20), 0),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (8, 6, 6), 0),
    "RNN, 16 steps": (lambda: nn.RNN(12, 16, batch_first=True), (16, 12), 0),
    "LSTM, 16 steps": (lambda: nn.LSTM(12, 16, batch_first=True), (16, 12), 0),
    "GRU, 16 steps": (lambda: nn.GRU(12, 16, batch_first=True), (16, 12), 0),
    "MultiheadAttention, 16 positions": (Attention, (16, 16), 0),
}


def ratios_of_kind(kind: str, bound: str, examples: int, seed: int) -> dict[str, list[float]]:
    """For each parameter: bound / norm for every example, with inputs of norm C1."""
    build, shape, ids = KINDS[kind]
    torch.manual_seed(seed)
    model = layers.clip_inputs(build().double(), input_norm=1.0, grad_norm=1.0, mode="normalize", bound=bound)
    names = [name.rpartition("layer.")[2] for name, _ in model.named_parameters()]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(examples):
        # Long enough to be clipped to C1; all bounds here are C1 C2 = C2 = 1.
        x = torch.randint(ids, (1, *shape)) if ids else 100 * torch.randn(1, *shape, dtype=torch.float64)
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        gradients = torch.autograd.grad(y, list(model.parameters()), torch.randn_like(y))
        for values, gradient in zip(found.values(), gradients, strict=True):
            values.append(AIM / float(gradient.norm()))
    return found


def table_of_networks(folder: str | None, examples: int, seed: int) -> list[str]:
    """The paper's networks."""
    kinds = ("L12", "L2", "upstream", "windows")
    lines = [f"| network | layer | {' | '.join(kinds)} | smallest |"]
    lines.append("| --- | --- | " + " | ".join(["---:"] * (len(kinds) + 1)) + " |")
    for title, (dataset, name, settings) in NETWORKS.items():
        torch.manual_seed(seed)
        model = models.build(name, **settings)
        x, y = images(dataset, folder, examples)
        for layer, found in ratios(model, x, y).items():
            cells = [f"{median(found[kind]):.2f}" if kind in found else "" for kind in kinds]
            least = min(min(values) for values in found.values())
            lines.append(f"| {title} | {layer} | {' | '.join(cells)} | {least:.4f} |")
    return lines


def table_of_kinds(examples: int, seed: int) -> list[str]:
    """Every kind of layer."""
    lines = ["| layer | parameter | gradient | upstream | smallest |", "| --- | --- | ---: | ---: | ---: |"]
    for kind in KINDS:
        both = [ratios_of_kind(kind, bound, examples, seed) for bound in ("gradient", "upstream")]
        for parameter in both[0]:
            cells = [f"{median(found[parameter]):.2f}" for found in both]
            least = min(min(found[parameter]) for found in both)
            lines.append(f"| {kind} | {parameter} | {' | '.join(cells)} | {least:.4f} |")
    return lines


def page(folder: str | None, examples: int, seed: int) -> str:
    """Both tables, with the command and versions."""
    here = environment(torch.device("cpu"))
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    command = f"python -m experiments backprop-clipping/tightness --examples {examples} --seed {seed}"
    command += f"{' --data FOLDER' if folder else ''} --out FILE"
    lines = [
        "# Bounds over gradients",
        "",
        f"Made by `{command}`, with Python {here['python']}, {versions}.",
        "",
        "Bound / norm: the median over examples, and the smallest of all, which must not fall below 1.",
        "",
        f"## The paper's networks at initialization, on {'training images' if folder else 'random numbers'}",
        "",
        *table_of_networks(folder, examples, seed),
        "",
        "## Every kind of layer, on random inputs and upstream gradients",
        "",
        *table_of_kinds(examples, seed),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them."""
    parser = parser_of("python -m experiments backprop-clipping/tightness", __doc__)
    parser.add_argument("--data", default=os.environ.get("CLIPWISE_DATA"), help="the folder of the data sets")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    text = page(options.data, options.examples, options.seed)
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
