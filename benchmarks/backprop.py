"""Time and memory of a step with backpropagation clipping, over those of non-private training plus noise.

    python -m benchmarks backprop --device cpu
    python -m benchmarks backprop --device cuda --out benchmarks/results/backprop-gpu.md

The column "plain + noise" is a non-private step plus noise: a backward pass of the summed losses, noise on every
coordinate, the optimizer. The private step adds clipped layers and the checks of `Backprop`. Both use the same batches.
Times are medians over steps that alternate between the two. Memory is the peak of a step above its start; on a CPU
it is the growth of a fresh process. For the times, the process keeps the memory that it frees (`keep_memory`). The
targets are 1.2 in time and 1.1 in memory. On CUDA both use TF32 for products and convolutions; `--as-it-comes` leaves
torch's switches as they are.

On CUDA there is a second table, of captured steps: the non-private step plus noise in one CUDA graph, and
`private.compiled`. The times do not include drawing the batch.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import Adjacency, Backprop, Unit, layers, make_private
from clipwise.clipping import Site
from clipwise.noise.gaussian import gaussian
from clipwise.sampling.schemes import make_scheme
from experiments import models
from experiments.harness.command import parser_of
from experiments.harness.environment import at_its_best, keep_memory

BASE = "plain + noise"
WAYS = (BASE, "upstream", "gradient")
BATCHES = 8  # in the data of a compiled run


class Encoder(nn.Module):
    """Token ids, two encoder layers, a mean over positions."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.table(ids)).mean(1))
        return scores


def mlp(width: int = 1024) -> nn.Module:
    """Four wide layers."""
    sizes = [784, width, width, width]
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def images(*shape: int) -> Callable[[int], Tensor]:
    """A function that draws random images of a shape."""
    return lambda batch: torch.randn(batch, *shape)


# The model, a function that draws inputs, and the batch sizes on a CPU and on a GPU.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], tuple[int, int]]] = {
    "mlp": (mlp, images(784), (256, 4096)),
    "mlp, 4096 wide": (lambda: mlp(4096), images(784), (64, 4096)),
    "mnist, as printed": (models.backprop_mnist, images(1, 28, 28), (512, 4096)),
    "mnist, padding and bias": (lambda: models.backprop_mnist(padding=True, bias=True), images(1, 28, 28), (512, 4096)),
    "cifar10, stride 2": (
        lambda: models.backprop_cifar10(pool_stride=2, padding=True, bias=True),
        images(3, 32, 32),
        (64, 2048),
    ),
    "encoder": (Encoder, lambda batch: torch.randint(0, 1000, (batch, 64)), (16, 512)),
}


def stepper(name: str, way: str, device: torch.device) -> Callable[[], None]:
    """A function that makes one step of a network."""
    build, draw, sizes = NETWORKS[name]
    batch = sizes[device.type == "cuda"]
    torch.manual_seed(0)
    model = build().to(device)
    if way != BASE:
        model = layers.clip_inputs(model, input_norm=1.0, grad_norm=0.1, bound=way)
    parameters = dict(model.named_parameters())
    x, y = draw(batch).to(device), torch.randint(0, 10, (batch,), device=device)
    sgd = torch.optim.SGD(parameters.values(), 1e-3)
    scheme = make_scheme("poisson", dataset_size=100 * batch, batch_size=batch)
    site = Site(model, parameters, Adjacency.ZERO_OUT, Unit.RECORD, scheme)
    clipper = None if way == BASE else Backprop().attach(site)

    def step() -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")
        if clipper is None:
            found = torch.autograd.grad(losses.sum(), list(parameters.values()))
            sums = dict(zip(parameters, found, strict=True))
        else:
            sums = clipper.clipped_sum(losses)
        for k, (parameter, p) in enumerate(parameters.items()):
            noise = gaussian(bytes([k + 1] * 32), p.numel(), 1.0, device=device, dtype=p.dtype)
            p.grad = sums.pop(parameter).add_(noise.view_as(p)).div_(batch)
        sgd.step()
        sgd.zero_grad()

    return step


def captured_plain_and_noise(name: str, device: torch.device) -> Callable[[], None]:
    """The non-private step plus noise in one CUDA graph."""
    build, draw, (_, batch) = NETWORKS[name]
    torch.manual_seed(0)
    model = build().to(device)
    x, y = draw(batch).to(device), torch.randint(0, 10, (batch,), device=device)
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, 1e-3)

    def step() -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")
        for p, found in zip(parameters, torch.autograd.grad(losses.sum(), parameters), strict=True):
            p.grad = found.add_(torch.randn_like(p)).div_(batch)
        sgd.step()

    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    kept = model, x, y  # a graph reads memory that it does not own

    def replay() -> None:
        assert kept
        graph.replay()

    return replay


def compiled(name: str, bound: str, device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that draws a batch, and one that makes the step of `private.compiled` on it."""
    build, draw, (_, batch) = NETWORKS[name]
    torch.manual_seed(0)
    model = layers.clip_inputs(build().to(device), input_norm=1.0, grad_norm=0.1, bound=bound)
    count = BATCHES * batch
    data = TensorDataset(draw(count).to(device), torch.randint(0, 10, (count,), device=device))
    sgd = torch.optim.SGD(model.parameters(), 1e-3)
    private = make_private(model, sgd, data, clipping=Backprop(), batch_size=batch, steps=10**6, noise_multiplier=1.0)
    step = private.compiled(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
    batches = (drawn for _ in iter(int, 1) for drawn in private.loader)
    at_hand: list[tuple[Tensor, ...]] = []
    return lambda: at_hand.append(next(batches)), lambda: (step(*at_hand.pop()), None)[1]


def captured_times(name: str, device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of each captured step, measured in turns."""
    ways = {BASE: (lambda: None, captured_plain_and_noise(name, device))}
    ways |= {way: compiled(name, way, device) for way in WAYS[1:]}
    return _in_turns(ways, device, seconds, before=16)


def times(name: str, device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of each step, measured in turns."""
    ways = {way: (lambda: None, stepper(name, way, device)) for way in WAYS}
    return _in_turns(ways, device, seconds, before=4)


def _in_turns(
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]], device: torch.device, seconds: float, before: int
) -> dict[str, float]:
    """Median times after warm-up. Each entry is a function to call before a step, and the step."""
    for prepare, step in ways.values():
        for _ in range(before):
            prepare()
            step()
    found: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[BASE]) < 5:
        for way, (prepare, step) in ways.items():
            prepare()
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            found[way].append(1e3 * (time.perf_counter() - start))
    return {way: median(taken) for way, taken in found.items()}


def memory(name: str, way: str, device: torch.device) -> float:
    """Peak MiB of a step, after the first steps, which probe the graph."""
    if device.type == "cuda":
        step = stepper(name, way, device)
        for _ in range(4):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        del step
        gc.collect()  # models are in reference cycles, and would count for the next one
        torch.cuda.empty_cache()
        return peak / 2**20
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_grown, args=(name, way, queue))
    process.start()
    process.join()
    return float(queue.get())


def _grown(name: str, way: str, queue: object) -> None:
    torch.set_num_threads(1)
    before = _most()
    step = stepper(name, way, torch.device("cpu"))
    for _ in range(4):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: the first steps probe the graph
    step()
    queue.put((_most() - before) / 1024)  # type: ignore[attr-defined]


def _most() -> int:
    """Peak memory of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _captured_table(names: list[str], device: torch.device, seconds: float) -> list[str]:
    lines = [
        "",
        "Captured steps: times over those of captured non-private plus noise.",
        "",
        "| network | captured plain + noise, ms | upstream | gradient |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in names:
        found = captured_times(name, device, seconds)
        ratios = (f"{found[way] / found[BASE]:.2f}" for way in WAYS[1:])
        cells = [name, f"{found[BASE]:.2f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write with `--out`."""
    parser = parser_of("python -m benchmarks backprop", __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", action="append", choices=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for the times of one network")
    parser.add_argument("--as-it-comes", action="store_true", help="leave torch's switches as they are")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with nullcontext() if options.as_it_comes else at_its_best(device):
        text = measured(options.network or list(NETWORKS), device, options.seconds)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 0


def measured(names: list[str], device: torch.device, seconds: float) -> str:
    """The tables."""
    # Memory first, before this process computes anything.
    taken = {name: {way: memory(name, way, device) for way in WAYS} for name in names}
    keep_memory()
    what = (
        f"{torch.cuda.get_device_name()}, products {torch.get_float32_matmul_precision()!r}"
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    lines = [
        f"{what}, torch {torch.__version__}; times and memory over those of non-private plus noise.",
        "",
        "| network | plain + noise, ms | upstream | gradient | plain + noise, MiB | upstream | gradient |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        t, m = times(name, device, seconds), taken[name]
        ratios = [f"{v[way] / v[BASE]:.2f}" for v in (t, m) for way in WAYS[1:]]
        cells = [name, f"{t[BASE]:.2f}", *ratios[:2], f"{m[BASE]:.0f}", *ratios[2:]]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if device.type == "cuda":
        lines += _captured_table(names, device, seconds)
    return "\n".join(lines) + "\n"
