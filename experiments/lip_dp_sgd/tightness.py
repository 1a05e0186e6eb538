"""How far the certified bounds are above true gradients: bound / norm, parameter by parameter.

python -m experiments.lip_dp_sgd.tightness [--effort tight] [--ascent 50] [--seed 0]

For networks at initialization, with weights clipped to norm 1: the largest norm over random examples, and after
steps uphill on it. A ratio above 1e4 is a failure, and is marked as one.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from torch import Tensor, nn

from clipwise import models
from clipwise.layers.bounded_norm import BoundedGroupNorm
from clipwise.layers.clip_input import ClipInput
from clipwise.lipschitz import SoftmaxCrossEntropy, bounds_of, clip_weights_, limits_of, trace
from clipwise.models.first_weights import make_orthogonal_

EXAMPLES = 64


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """The two-layer network for tables."""
    return nn.Sequential(ClipInput(1.0), nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 2)), (14,)


def convnet(normalized: bool = False, bias: bool = True) -> tuple[nn.Module, tuple[int, ...]]:
    """Three convolutions and a linear layer, on grey images of 28 x 28."""
    layers: list[nn.Module] = [ClipInput(1.0)]
    channels = 1
    for wide in (16, 32, 32):
        layers += [nn.Conv2d(channels, wide, 3, stride=2, padding=1, bias=bias), nn.ReLU()]
        if normalized:
            layers.append(BoundedGroupNorm(4, wide, alpha=0.1))
        channels = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10, bias=bias)), (1, 28, 28)


def paper(name: str, norm: str = "none") -> tuple[nn.Module, tuple[int, ...]]:
    """A network with the paper's number of parameters."""
    shape = (3, 32, 32) if name.endswith("vgg") else (1, 28, 28)
    return models.build(name, input_norm=1.0, norm=norm), shape


def as_run(name: str, norm: str = "none") -> tuple[nn.Module, tuple[int, ...]]:
    """The same as figure 1 has it, with orthogonal first weights."""
    model, shape = paper(name, norm)
    make_orthogonal_(model)
    return model, shape


NETWORKS = {
    "mlp": mlp,
    "convnet": convnet,
    "convnet, no biases": lambda: convnet(bias=False),
    "convnet + group norm": lambda: convnet(normalized=True),
    **{name: partial(paper, name) for name in ("convnet3", "convnet6", "shallow_vgg")},
    **{
        f"{name} + group norm": partial(paper, name, "bounded")
        for name in ("convnet3", "convnet6", "shallow_vgg")
    },
    **{
        f"{name}, orthogonal{words}": partial(as_run, name, norm)
        for name in ("convnet3", "patch_convnet6", "patch_vgg")
        for norm, words in (("none", ""), ("bounded", " + group norm"))
    },
}


def largest_norms(model: nn.Module, shape: tuple[int, ...], ascent: int) -> dict[str, float]:
    """The largest gradient norm of each parameter that random examples and steps uphill from them have."""
    found: dict[str, float] = {}
    x = torch.randn(EXAMPLES, *shape)
    for name, p in model.named_parameters():
        best, example, label = 0.0, x[:1], None
        for one in x:
            norm, y = _norm(model, p, one.unsqueeze(0))
            if norm > best or label is None:
                best, example, label = norm, one.unsqueeze(0), y
        for _ in range(ascent):
            example, norm = _uphill(model, p, example, label)
            best = max(best, norm)
        found[name] = best
    return found


def _norm(model: nn.Module, p: nn.Parameter, x: Tensor) -> tuple[float, Tensor]:
    """For the label that the model finds least likely."""
    outputs = model(x)
    y = outputs.argmin(1)
    (g,) = torch.autograd.grad(SoftmaxCrossEntropy()(outputs, y).sum(), p)
    return float(g.norm()), y


def _uphill(model: nn.Module, p: nn.Parameter, x: Tensor, y: Tensor | None) -> tuple[Tensor, float]:
    assert y is not None
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(SoftmaxCrossEntropy()(model(x), y).sum(), p, create_graph=True)
    norm = g.norm()
    if not norm.requires_grad:  # for instance the bias of a linear model
        return x.detach(), float(norm)
    (up,) = torch.autograd.grad(norm, x, allow_unused=True)
    if up is None or not float(up.norm()) > 0:
        return x.detach(), float(norm.detach())
    return (x + 0.05 * x.norm() * up / up.norm()).detach(), float(norm.detach())


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--effort", default="spectral", choices=("frobenius", "spectral", "tight"))
    parser.add_argument("--ascent", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| network | parameter | bound | largest found | bound / found |\n|---|---|---|---|---|")
    for name, make in NETWORKS.items():
        torch.manual_seed(options.seed)
        model, shape = make()
        network = trace(model, shape)
        clip_weights_(network, limits_of(network, 1.0))
        constant = SoftmaxCrossEntropy().constant(network.output_shape)
        bounds = bounds_of(network, constant, effort=options.effort).sensitivities
        found = largest_norms(model, shape, options.ascent)
        for parameter, norm in found.items():
            ratio = bounds[parameter] / norm if norm > 0 else math.inf
            mark = " (failure)" if ratio > 1e4 else ""
            print(f"| {name} | {parameter} | {bounds[parameter]:.4g} | {norm:.4g} | {ratio:.2f}{mark} |")


if __name__ == "__main__":
    main()
