"""Throughput of private training over several processes, next to non-private training with the same layout.

    python -m benchmarks distributed --ranks 1 2 --out benchmarks/results/distributed/cpu.md

Each layout and number of ranks gets its own processes, started by torchrun: gloo on the CPU, NCCL on CUDA devices. The
global batch is fixed, so more ranks share the same work. The plain layout is measured on one rank only: without a
wrapper, non-private ranks would not exchange gradients. A figure is the median of the steps after a warm-up. On the
CPU private and non-private steps take turns; on a CUDA device one kind runs after the other, for its memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.networks.attention import GPT2
from benchmarks.shapes import Tokens
from clipwise import PerExample, make_private
from experiments.harness.command import parser_of
from experiments.harness.environment import at_its_best, environment

NETWORKS = {"gpt2-mini": {"width": 256, "depth": 4, "heads": 4}, "gpt2-small": {}}
LAYOUTS = ("plain", "ddp", "fsdp")
WARM_UP = 3


def add_options(parser: ArgumentParser) -> None:
    """The options of both the table and a single measurement."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--network", default="gpt2-mini", choices=NETWORKS)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="examples of a step, over all ranks")
    parser.add_argument("--dtype", default="float32", help="of forward passes: float32 or bfloat16")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process on the CPU")


def laid_out(model: nn.Module, options: Namespace) -> nn.Module:
    """The model for the measured layout."""
    if options.layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if options.layout == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = torch.bfloat16 if options.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def losses_of(model: nn.Module, ids: Tensor, options: Namespace) -> Tensor:
    """The mean loss over the tokens of each example."""
    is_mixed = options.dtype == "bfloat16" and options.layout != "fsdp"  # FSDP2 has its own policy
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_mixed):
        logits = model(ids)
    # Targets are the inputs: the cost is that of next-token prediction.
    return F.cross_entropy(logits.float().transpose(1, 2), ids, reduction="none").mean(1)


Step = Callable[[], None]


@contextmanager
def stepping(options: Namespace, is_private: bool, device: torch.device) -> Iterator[Step]:
    """A function that takes a step of private or of non-private training."""
    torch.manual_seed(0)
    ids = torch.randint(options.vocabulary, (8 * options.batch, options.length), device=device)
    with torch.device(device):
        network = GPT2(Tokens(options.length, options.vocabulary), **NETWORKS[options.network])
    model = laid_out(network, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not is_private:
        own = ids[dist.get_rank() : options.batch : dist.get_world_size()]

        def ordinary() -> None:
            losses_of(model, own, options).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        yield ordinary
        return
    with make_private(
        model,
        optimizer,
        TensorDataset(ids),
        sampling="fixed-size",
        batch_size=options.batch,
        noise_multiplier=1.0,
        clipping=PerExample(max_norm=1.0),
        probe_independence=False,
    ) as private:

        def step() -> None:
            (batch,) = next(iter(private.loader))
            private.step(losses_of(model, batch, options))

        yield step


def seconds_of(step: Step, device: torch.device) -> float:
    """The seconds of a step that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(options: Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Both kinds of training in turns, so that other load on the machine affects both."""
    with stepping(options, False, device) as plain, stepping(options, True, device) as private:
        steps = {"plain": plain, "private": private}
        times = [
            {kind: seconds_of(step, device) for kind, step in steps.items()} for _ in range(WARM_UP + options.steps)
        ]
    return {kind: {"ms": 1e3 * statistics.median(t[kind] for t in times[WARM_UP:])} for kind in steps}


def with_memory(options: Namespace, device: torch.device, is_private: bool) -> dict[str, float]:
    """One kind of training alone on a CUDA device: the time, and the largest memory in GiB."""
    times = []
    with stepping(options, is_private, device) as step:
        for number in range(WARM_UP + options.steps):
            if number == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            times.append(seconds_of(step, device))
        memory = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": 1e3 * statistics.median(times[WARM_UP:]), "GiB": memory}


def measure() -> None:
    """Measure one layout, in a process of torchrun."""
    parser = ArgumentParser()
    add_options(parser)
    parser.add_argument("--layout", choices=LAYOUTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with at_its_best(device):
        if device.type == "cuda":
            found = {kind: with_memory(options, device, kind == "private") for kind in ("plain", "private")}
        else:
            found = in_turns(options, device)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def row(layout: str, ranks: int, options: Namespace) -> str:
    """A line of the table."""
    names = ("device", "network", "length", "vocabulary", "batch", "dtype", "steps", "threads")
    own = [f"--{name}={getattr(options, name)}" for name in names]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    command = [*launch, "-m", "benchmarks.distributed", f"--layout={layout}", *own]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ).stdout
    found: dict[str, dict[str, Any]] = json.loads(output.splitlines()[-1])
    plain, private = found["plain"], found["private"]
    cells = [f"{m['ms']:.1f} | {1e3 * options.batch / m['ms']:.1f}" for m in (plain, private)]
    memory = [f"{m['GiB']:.2f}" if "GiB" in m else "" for m in (plain, private)]
    ratio = f"{private['ms'] / plain['ms']:.2f}"
    return f"| {layout} | {ranks} | {cells[0]} | {cells[1]} | {ratio} | {memory[0]} | {memory[1]} |"


def main(arguments: Sequence[str]) -> None:
    """Measure, print and keep the table."""
    parser = parser_of("python -m benchmarks distributed", __doc__)
    add_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows = [
        row(layout, ranks, options)
        for layout in options.layouts
        for ranks in options.ranks
        if layout != "plain" or ranks == 1
    ]
    lines = [
        "# Private training over several processes",
        "",
        f"{options.network}, {options.length} tokens, vocabulary {options.vocabulary}, {options.batch} examples per "
        f"step over all ranks, {options.dtype}, AdamW, seed 0; medians of {options.steps} steps. On the CPU "
        f"{options.threads} thread(s) per process. `python -m benchmarks distributed {' '.join(arguments)}`.",
        "",
        "| layout | ranks | non-private, ms | examples/s | private, ms | examples/s | ratio | non-private, GiB | "
        "private, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        ", ".join(f"{name} {value}" for name, value in environment(torch.device(options.device)).items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    measure()
