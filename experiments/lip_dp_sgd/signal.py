"""Gradient over noise at the initial weights: whether weight clipping can learn anything.

    python -m experiments lip-dp-sgd/signal --data DIR [--records 1500] [--batch 3000]

For networks on Fashion-MNIST with unclipped weights: the norm of the mean gradient times the expected batch size, over
the norm of the noise of one step with multiplier 1. DP-SGD clips each gradient to 0.1. The gradients are measured
without noise. The data is public; for private records they must not be shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.lipschitz import SoftmaxCrossEntropy, bounds_of, trace
from clipwise.lipschitz.rule import Effort
from experiments import data, models
from experiments.harness.command import parser_of
from experiments.lip_dp_sgd.bound_tightness import noise_of
from experiments.models import make_orthogonal_

INPUT_NORM, CLIP = 12.0, 0.1
NETWORKS = ("convnet3", "convnet6", "patch_convnet6")
EFFORTS: tuple[Effort, ...] = ("spectral", "tight")


def network(name: str, is_orthogonal: bool) -> nn.Module:
    """A network with initial weights from seed 0."""
    torch.manual_seed(0)
    model = models.build(name, input_norm=INPUT_NORM)
    if is_orthogonal:
        make_orthogonal_(model)
    return model


def of_weight_clipping(model: nn.Module, x: Tensor, y: Tensor, batch: int, effort: Effort) -> float:
    """L |mean gradient| / sum_k S_k sqrt(d_k), which is the length of the noise with the optimal split."""
    traced = trace(model, tuple(x.shape[1:]))
    bounds = bounds_of(traced, SoftmaxCrossEntropy().constant(traced.output_shape), effort=effort)
    mean = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return batch * math.hypot(*(float(g.norm()) for g in mean)) / noise_of(bounds, traced)


def of_gradient_clipping(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    """L |mean clipped gradient| / (C sqrt(d)), one example at a time."""
    weights = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in weights))
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
        total += flat * min(1.0, CLIP / float(flat.norm()))
    return batch * float(total.norm()) / len(x) / (CLIP * math.sqrt(len(total)))


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = parser_of("python -m experiments lip-dp-sgd/signal", __doc__)
    parser.add_argument("--data", help="the folder of data sets, or CLIPWISE_DATA")
    parser.add_argument("--records", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=3000)
    asked = parser.parse_args(arguments)
    x, y = (t[: asked.records] for t in data.images("fashion_mnist", True, asked.data).tensors)
    print("| network | first weights | weight clipping | with tight bounds | DP-SGD |\n|---|---|---:|---:|---:|")
    for name in NETWORKS:
        for is_orthogonal in (False, True):
            model = network(name, is_orthogonal)
            found = [of_weight_clipping(model, x, y, asked.batch, effort) for effort in EFFORTS]
            found.append(of_gradient_clipping(model, x, y, asked.batch))
            first = "orthogonal" if is_orthogonal else "torch's"
            print(f"| {name} | {first} | " + " | ".join(f"{value:.2g}" for value in found) + " |", flush=True)
