"""The cost of two streamed passes on a GPU, against plain training and book-keeping: `python -m tests.gpu.streaming`.

Reports time and peak memory as ratios to a plain forward and backward pass, in TF32; the largest difference between the
sums of the two methods; the choice of `auto` with little memory, and its cost; an error in a rule. Exit code 1 if a
check fails.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.gradients import Memory, free_memory, per_example_gradients
from clipwise.gradients.methods import Reweighted
from clipwise.gradients.rules import registry
from clipwise.gradients.stream import Stream
from tests.gpu.verdicts import Verdicts, failures_of
from tests.soundness.neighbours import attach

VOCABULARY, WIDTH, HEADS, DEPTH = 50257, 768, 12, 12
SHAPES = ((32, 256), (16, 1024))  # batch, positions
ROUNDS, SETTLING = 7, 4
CLOSE = 2e-3  # TF32 sums of the two methods, relative to their norm
FACTOR = 0.05  # allowed difference of their clip factors


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, WIDTH)
        x = x + self.out(heard)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Like GPT-2 small, with the head tied to the table."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(h)) @ self.table.weight.T


def per_example_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean cross entropy of each text."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1).mean(1)


def measure(steps: dict[str, Callable[[], object]]) -> dict[str, tuple[float, int]]:
    """Milliseconds (median, interleaved) and peak bytes (including the model) of each step."""
    peaks = {}
    for name, step in steps.items():
        for _ in range(SETTLING):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: (statistics.median(times[name]), peaks[name]) for name in steps}


def check_costs() -> Verdicts:
    """A table for each shape; both methods give the same sums."""
    for batch, positions in SHAPES:
        yield from costs(batch, positions)
        torch.cuda.empty_cache()


def costs(batch: int, positions: int) -> Verdicts:
    torch.manual_seed(0)
    model = Language(positions).cuda()
    ids = torch.randint(0, VOCABULARY, (batch, positions + 1), device="cuda")
    clippers = {m: attach(model, PerExample(1.0, method=m)) for m in ("bookkeeping", "reweight")}

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        per_example_losses(model, ids).mean().backward()
        model.zero_grad(set_to_none=True)

    def private(method: str) -> Callable[[], dict[str, Tensor]]:
        return lambda: clippers[method].clipped_sum(per_example_losses(model, ids))

    found = measure({"plain": plain, **{method: private(method) for method in clippers}})
    for name, (milliseconds, peak) in found.items():
        ratios = f"{milliseconds / found['plain'][0]:.3f} x time, {peak / found['plain'][1]:.3f} x memory"
        print(f"  B={batch} T={positions} {name:12} {milliseconds:8.1f} ms {peak / 2**30:6.2f} GiB   {ratios}")
    one, other = (private(method)() for method in clippers)
    # In TF32 the methods may clip an example by slightly different factors: one writes a gradient out, the other bounds
    # its rounding error. So the sums are equal up to a factor near 1.
    length, inner = (sum(float((one[n] * t[n]).sum()) for n in one) for t in (one, other))
    factor = inner / length
    rest = math.sqrt(sum(float((other[n] - factor * one[n]).square().sum()) for n in one) / length)
    what = f"B={batch} T={positions} sums of the two methods: a factor of {factor:.4f}, and {rest:.1e} apart"
    print(f"  {what}")
    yield what, rest <= CLOSE and abs(factor - 1) < FACTOR


def small() -> tuple[nn.Module, Tensor, Memory]:
    """A model with a known graph."""
    model, x = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).cuda(), torch.randn(16, 9, 64).cuda())
    memory = Memory()
    for _ in range(2):
        per_example_gradients(model(x).sum((1, 2)), dict(model.named_parameters()), memory).squared_norms()
    return model, x, memory


def forget_choices(memory: Memory) -> None:
    for outline in memory.outlines._known:
        outline.fits.clear()


def check_choices() -> Verdicts:
    """The choice of `auto` by free memory, and the time to decide."""
    model, x, memory = small()
    parameters = dict(model.named_parameters())
    for free, streams in ((0, True), (2**50, False)):
        forget_choices(memory)
        with mock.patch.object(free_memory, "free_bytes", return_value=free):
            found = per_example_gradients(model(x).sum((1, 2)), parameters, memory)
        yield f"with {free} bytes free it streams: {not streams}", isinstance(found, Reweighted) is streams
    stream = Stream(model(x).sum((1, 2)), parameters, memory)
    for known in (False, True):
        if not known:
            forget_choices(memory)
        start = time.perf_counter()
        stream.fits()
        print(f"  choice, {'known' if known else 'new'}: {1e6 * (time.perf_counter() - start):.0f} us")


class Odd(Exception):  # noqa: N818 (raised by a rule in a test)
    """An error class that torch does not have."""


def check_errors() -> Verdicts:
    """An error inside a hook, on the device's own thread, is raised unchanged."""
    model, x, memory = small()
    odd = Odd()

    def failing(node: Any, shapes: registry.Shapes) -> registry.Finish:
        def finish(g: Tensor, layout: Any) -> Any:
            raise odd

        return finish

    found = model(x).sum((1, 2))
    with mock.patch.dict(registry._RULES, dict.fromkeys(registry._RULES, failing)):
        gradients = per_example_gradients(found, dict(model.named_parameters()), memory, "reweight")
        raised: Exception | None = None
        try:
            gradients.squared_norms()
        except Odd as error:
            raised = error
        yield "the error was lost", raised is odd
    found.sum().backward()
    yield ("the graph is not whole, or a hook is left on it", all(p.grad is not None for p in model.parameters()))


def main() -> int:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return 1 if failures_of((check_errors, check_choices, check_costs)) else 0


if __name__ == "__main__":
    sys.exit(main())
