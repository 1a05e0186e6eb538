"""Steps as CUDA graphs: captured once, replayed for each batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

import torch
from torch import Tensor

from benchmarks.workload import Workload
from clipwise.engine.compiled import CaptureWarning
from clipwise.engine.private import Private

_BEFORE_CAPTURE = 3  # steps on a side stream: libraries choose kernels and allocate workspaces


@contextmanager
def graphed_steps(workload: Workload) -> Iterator[Callable[[], None]]:
    """The non-private step as one graph: copy the batch into place, then replay the graph."""
    optimizer, batches = workload.optimizer(), workload.batches()
    x, y = (tensor.clone() for tensor in next(batches))

    def train() -> None:
        optimizer.zero_grad()  # no gradients at the capture, so the graph writes them instead of adding
        torch.autograd.backward(workload.losses(x, y).mean())
        optimizer.step()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_BEFORE_CAPTURE):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()

    def step() -> None:
        next_x, next_y = next(batches)
        x.copy_(next_x)
        y.copy_(next_y)
        graph.replay()

    try:
        yield step
    finally:
        graph.reset()


def compiled_steps(
    workload: Workload, private: Private, settling: int, backend: str = "cudagraphs"
) -> Callable[[], None]:
    """The graph of a private run, `private.compiled(loss, backend=...)`, replayed for each batch of its loader.

    If capturing fails, a run continues with eager steps. Those are another column, so here it is an error if there
    is no graph after the first `settling` steps. On a CPU there are no captured steps, and `backend="cudagraphs"` is
    not checked.
    """

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return workload.losses(x, y)

    replay = private.compiled(loss, backend=backend)
    batches = chain.from_iterable(repeat(private.loader))
    can_compile = backend != "cudagraphs" or workload.inputs.device.type == "cuda"
    made = 0

    def step() -> None:
        nonlocal made
        made += 1
        if made > settling:
            if made == settling + 1 and can_compile and replay.form == "eager":
                raise RuntimeError(f"no compiled step after {settling} steps")
            replay(*next(batches))
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            replay(*next(batches))

    return step
