"""The cost of a step with bounded weights, next to a non-private step plus noise and to per-example clipping.

    python -m benchmarks lipschitz [--batch 256] [--threads 2] [--rounds 15] [--clock cpu] [--network convnet-3]

The networks are similar to those of the Lip-DP-SGD paper, which does not list its layers; those of
`experiments.models` have its numbers of parameters. The column "plain + noise" is non-private training plus the noise
on the gradient, with batches drawn from data in memory; no private step costs less. All steps are timed in turns on
images. A row shows the median time of plain + noise, and for each other step the median of its ratio to it in the
same round. `--clock cpu` counts the processor time of all threads, which depends less on the load of the machine. The
process keeps the memory that it frees (`keep_memory`). Ends with an error if a ratio is above 1.15.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import Lipschitz, PerExample, make_private
from clipwise.layers import BoundedGroupNorm, ClipInput
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from experiments import models
from experiments.harness.command import parser_of
from experiments.harness.environment import keep_memory

TARGET = 1.15
BASE = "plain + noise"
BATCHES = 16  # in the data
NORM = 1.0
UNCOUNTED = 3

Clock = Callable[[], float]
Shape = tuple[int, ...]


def convolutions(channels: tuple[int, ...], pooled: tuple[int, ...], out: int) -> nn.Sequential:
    """3 x 3 convolutions with ReLU, a pool after some of them, and a linear layer."""
    layers: list[nn.Module] = [ClipInput(NORM)]
    now = 1
    for place, wide in enumerate(channels):
        layers += [nn.Conv2d(now, wide, 3, padding=1), nn.ReLU()]
        if place in pooled:
            layers.append(nn.MaxPool2d(2))
        now = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(out, 10))


def normalized(network: nn.Sequential) -> nn.Sequential:
    """The same with a bounded group norm behind each convolution."""
    layers: list[nn.Module] = []
    for layer in network:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(BoundedGroupNorm(4, layer.out_channels, alpha=0.1))
    return nn.Sequential(*layers)


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "convnet-3": lambda: convolutions((32, 64, 64), (0, 1, 2), 576),
    "convnet-3, norms": lambda: normalized(convolutions((32, 64, 64), (0, 1, 2), 576)),
    "convnet-6": lambda: convolutions((32, 32, 64, 64, 64, 64), (1, 3, 5), 576),
    "shallow-vgg": lambda: convolutions((32, 32, 64, 64), (1, 3), 3136),
    # With the paper's numbers of parameters.
    "models.convnet3": lambda: models.convnet3(input_norm=NORM),
    "models.convnet3, norms": lambda: models.convnet3(input_norm=NORM, norm="bounded"),
    "models.convnet6": lambda: models.convnet6(input_norm=NORM),
    "models.shallow_vgg": lambda: models.shallow_vgg(input_norm=NORM),
}
COLOURED = ("models.shallow_vgg",)  # 3 x 32 x 32; the others are for grey images of 28 x 28


def records(batch: int, shape: Shape) -> TensorDataset:
    """Images and labels for a few batches."""
    return TensorDataset(torch.rand(BATCHES * batch, *shape), torch.randint(0, 10, (BATCHES * batch,)))


def batches(data: TensorDataset, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Shuffled batches, epoch after epoch, indexed from memory."""
    while True:
        for chosen in torch.randperm(len(data)).split(size):
            yield tuple(tensor[chosen] for tensor in data.tensors)


def plain_and_noise(model: nn.Module, batch: int, shape: Shape) -> Callable[[], None]:
    """A non-private step plus noise on its gradient. It does not clip, so it is not private."""
    optimizer, drawn, key = (
        torch.optim.SGD(model.parameters(), lr=1e-3),
        batches(records(batch, shape), batch),
        NoiseKey.fresh(),
    )
    weights = list(model.parameters())

    def step() -> None:
        x, y = next(drawn)
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights)
        noise = gaussian(key.derive("noise"), sum(p.numel() for p in weights), 1e-3)
        key.advance()
        pieces = torch.split(noise, [p.numel() for p in weights])
        for p, gradient, piece in zip(weights, gradients, pieces, strict=True):
            p.grad = gradient + piece.view_as(p)
        optimizer.step()

    return step


def private(model: nn.Module, batch: int, shape: Shape, strategy: Lipschitz | PerExample) -> Callable[[], None]:
    """A private step, with all its checks."""
    run = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        records(batch, shape),
        clipping=strategy,
        batch_size=batch,
        sampling="shuffled",
        noise_multiplier=1.0,
    )
    drawn = chain.from_iterable(repeat(run.loader))

    def step() -> None:
        x, y = next(drawn)
        outputs = model(x)
        run.step(F.cross_entropy(outputs, y, reduction="none"), outputs)

    return step


def in_turns(acts: dict[str, Callable[[], None]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each step in each round. The first rounds, in which clipwise checks graphs, do not count."""
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(UNCOUNTED + rounds):
        for name, act in acts.items():
            start = clock()
            act()
            taken[name].append(clock() - start)
    return {name: times[UNCOUNTED:] for name, times in taken.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    clocks: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
    parser = parser_of("python -m benchmarks lipschitz", __doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(clocks), default="wall")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="all if left out")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    keep_memory()
    strategies: dict[str, Lipschitz | PerExample] = {
        "Lipschitz": Lipschitz(NORM, NORM),
        "fixed": Lipschitz(NORM, NORM, fixed=True),
        "PerExample": PerExample(1.0),
    }
    print(f"batches of {asked.batch}, {asked.threads} threads, {asked.clock} time, torch {torch.__version__}\n")
    print(
        "| network | parameters | plain + noise, ms | "
        + " | ".join(f"{name} / plain + noise" for name in strategies)
        + " |"
    )
    print("|---|---:|---:|" + "---:|" * len(strategies))
    worst = 0.0
    for name in asked.network or NETWORKS:
        build = NETWORKS[name]
        shape = (3, 32, 32) if name in COLOURED else (1, 28, 28)
        acts = {BASE: plain_and_noise(build(), asked.batch, shape)} | {
            how: private(build(), asked.batch, shape, strategy) for how, strategy in strategies.items()
        }
        taken = in_turns(acts, asked.rounds, clocks[asked.clock])
        ratios = [median(a / b for a, b in zip(taken[how], taken[BASE], strict=True)) for how in strategies]
        worst = max(worst, *ratios[:2])
        size = sum(p.numel() for p in build().parameters())
        cells = [name, f"{size:,}", f"{1000 * median(taken[BASE]):.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(worst > TARGET)
