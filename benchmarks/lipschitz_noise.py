"""How splitting the noise over parameters, and balancing layers, reduce the noise of bounded weights.

    python -m benchmarks lipschitz-noise

For networks at initialization with weights clipped to norm 4 and inputs to 1 it prints sqrt(E |noise|^2) / z of a
step, where parameter k has d_k numbers and the sensitivity Delta_k:

    one part, flat    sqrt(sum_k Delta_k^2) sqrt(sum_k d_k)
    equal split       sqrt(K sum_k Delta_k^2 d_k)
    optimal split     sum_k Delta_k sqrt(d_k)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.lipschitz import NETWORKS
from clipwise import Lipschitz, make_private
from clipwise.layers import ClipInput
from experiments.harness.command import parser_of

WEIGHTS, INPUTS, SEED = 4.0, 1.0, 0


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers without biases, ReLU between them."""
    layers: list[nn.Module] = [ClipInput(INPUTS), nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


CASES: dict[str, Callable[[], nn.Sequential]] = {
    "MLP 784-64-10, no biases": lambda: mlp(784, 64, 10),
    "MLP 784-64-64-10, no biases": lambda: mlp(784, 64, 64, 10),
    **{name: NETWORKS[name] for name in ("convnet-3", "convnet-6", "shallow-vgg")},
}


def parts_of(model: nn.Module, balanced: bool) -> list[tuple[float, int]]:
    """Delta_k and d_k."""
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(torch.zeros(4, 1, 28, 28)),
        clipping=Lipschitz(WEIGHTS, INPUTS, balanced=balanced),
        batch_size=2,
        noise_multiplier=1.0,
    )
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return [(part.sensitivity, sum(sizes[n] for n in part.parameters)) for part in private.parts()]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser_of("python -m benchmarks lipschitz-noise", __doc__).parse_args(arguments)
    print("| network | one part, flat | equal split | optimal split | and balanced |")
    print("|---|---:|---:|---:|---:|")
    for name, build in CASES.items():
        found = []
        for balanced in (False, True):
            torch.manual_seed(SEED)
            found.append(parts_of(build(), balanced))
        plain, even = found
        figures = (
            math.sqrt(sum(s * s for s, _ in plain) * sum(d for _, d in plain)),
            math.sqrt(len(plain) * sum(s * s * d for s, d in plain)),
            sum(s * math.sqrt(d) for s, d in plain),
            sum(s * math.sqrt(d) for s, d in even),
        )
        print(f"| {name} | {' | '.join(f'{x:,.0f}' for x in figures)} |")
