"""The ratio of certified bounds to true gradient norms, for each parameter.

    python -m experiments lip-dp-sgd/tightness [--effort tight] [--ascent 50] [--seed 0] [--trained]

For networks at initialization, with weights clipped to norm 1: the largest norm over random examples, also after
gradient ascent on it. With --trained: for a network that was trained privately on the digits, on held-out digits. A
ratio above 1e4 is marked as a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from clipwise.layers.bounded import BoundedGroupNorm, ClipInput
from clipwise.lipschitz import BoundedLoss, SoftmaxCrossEntropy, clip_weights_, limits_of, trace
from clipwise.lipschitz.rule import Effort
from experiments import models
from experiments.harness.command import parser_of
from experiments.lip_dp_sgd import training
from experiments.lip_dp_sgd.bound_tightness import tightness
from experiments.lip_dp_sgd.sets import records
from experiments.lip_dp_sgd.trial import Trial
from experiments.models import make_orthogonal_

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
    """The network of figure 1, with orthogonal initial weights."""
    model, shape = paper(name, norm)
    make_orthogonal_(model)
    return model, shape


NETWORKS = {
    "mlp": mlp,
    "convnet": convnet,
    "convnet, no biases": lambda: convnet(bias=False),
    "convnet + group norm": lambda: convnet(normalized=True),
    **{name: partial(paper, name) for name in ("convnet3", "convnet6", "shallow_vgg")},
    **{f"{name} + group norm": partial(paper, name, "bounded") for name in ("convnet3", "convnet6", "shallow_vgg")},
    **{
        f"{name}, orthogonal{words}": partial(as_run, name, norm)
        for name in ("convnet3", "patch_convnet6", "patch_vgg")
        for norm, words in (("none", ""), ("bounded", " + group norm"))
    },
}


def rows(
    model: nn.Module, loss: BoundedLoss, x: Tensor, effort: Effort, ascent: int
) -> Iterator[tuple[str, float, float]]:
    """For each parameter: its bound, and the largest gradient norm of these examples, also after gradient ascent."""
    y = model(x).argmin(1)  # the labels that the model finds least likely
    for name, found in tightness(model, loss, x, y, effort=effort).items():
        best, example = found.largest, x[found.example].unsqueeze(0)
        for _ in range(ascent):
            example, norm = _uphill(model, loss, model.get_parameter(name), example, y[found.example].unsqueeze(0))
            best = max(best, norm)
        yield name, found.bound, best


def _uphill(model: nn.Module, loss: BoundedLoss, p: nn.Parameter, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(model(x), y).sum(), p, create_graph=True)
    norm = g.norm()
    if not norm.requires_grad:  # for instance the bias of a linear model
        return x.detach(), float(norm)
    (up,) = torch.autograd.grad(norm, x, allow_unused=True)
    if up is None or not float(up.norm()) > 0:
        return x.detach(), float(norm.detach())
    return (x + 0.05 * x.norm() * up / up.norm()).detach(), float(norm.detach())


def main(arguments: Sequence[str]) -> None:
    """Print one table."""
    parser = parser_of("python -m experiments lip-dp-sgd/tightness", __doc__)
    parser.add_argument("--effort", default="spectral", choices=("frobenius", "spectral", "tight"))
    parser.add_argument("--ascent", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", action="store_true")
    options = parser.parse_args(arguments)
    print("| network | parameter | bound | largest found | bound / found |\n|---|---|---|---|---|")
    for name, model, loss, x in _trained(options.seed) if options.trained else _untrained(options.seed):
        for parameter, bound, norm in rows(model, loss, x, options.effort, options.ascent):
            ratio = bound / norm if norm > 0 else math.inf
            mark = " (failure)" if ratio > 1e4 else ""
            print(f"| {name} | {parameter} | {bound:.4g} | {norm:.4g} | {ratio:.2f}{mark} |")


Case = tuple[str, nn.Module, BoundedLoss, Tensor]


def _untrained(seed: int) -> Iterator[Case]:
    for name, make in NETWORKS.items():
        torch.manual_seed(seed)
        model, shape = make()
        network = trace(model, shape)
        clip_weights_(network, limits_of(network, 1.0))
        yield name, model, SoftmaxCrossEntropy(), torch.randn(EXAMPLES, *shape)


def _trained(seed: int) -> Iterator[Case]:
    trial = Trial(
        "digits", "lip", epsilon=3.0, batch_size=256, epochs=20, max_norm=2.0, temperature=0.5, learning_rate=1e-2
    )
    at_hand = records(trial.data, None, torch.device("cpu"))
    model = training.begun(trial, at_hand, seed).all_steps().model
    accuracy, _ = training.judged(model, at_hand.held_out)
    name = f"mlp2, trained on digits to {accuracy:.1%}"
    yield name, model, SoftmaxCrossEntropy(trial.temperature), at_hand.held_out.tensors[0][:EXAMPLES]
