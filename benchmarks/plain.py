"""Plain training, timed without clipwise's engine: a check on the baseline of `python -m benchmarks peers`.

    python -m benchmarks plain --device cuda
    python -m benchmarks plain --device cuda --row mlp --compare benchmarks/results/peers-gpu/results.json

Only the networks and the names of the rows come from clipwise. Data, loop, clock and the choice of the form
(layout of images, foreach or fused SGD) are separate implementations. Prints milliseconds per step: the median over
blocks of steps, in the fastest form. With `--compare`, ends with an error if a plain step of the suite differs
by more than 3%.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.networks import build, train_only
from benchmarks.peers.rows import Row, rows_for
from benchmarks.shapes import shape_of
from experiments.harness.command import parser_of

TOLERANCE = 0.03
BLOCKS, BLOCK_SECONDS, MOST_SECONDS = 15, 0.05, 20.0


def trainer(row: Row, device: torch.device, optimizer: dict[str, bool], channels_last: bool):
    """A function that makes one step of ordinary training."""
    shape, batch = shape_of(row.setting.data), row.setting.batch
    torch.manual_seed(0)
    model = train_only(build(row.setting.model, shape), row.setting.trained).to(device)
    images, labels = (tensor.to(device) for tensor in shape.draw(4 * batch))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, **optimizer)

    def rows():
        while True:
            yield from torch.randperm(len(images), device=device).split(batch)

    order = rows()

    def step() -> None:
        chosen = next(order).repeat_interleave(row.setting.views)
        with torch.autocast(device.type, torch.bfloat16, enabled=row.setting.bf16):
            outputs = model(images[chosen])
            loss = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), labels[chosen].reshape(-1))
        sgd.zero_grad()
        loss.backward()
        sgd.step()

    return step


def milliseconds(step, device: torch.device) -> float:
    """The median over blocks; the first steps are not counted."""

    def timed(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    timed(2)
    count = max(1, round(BLOCK_SECONDS / timed(1)))
    taken, start = [], time.perf_counter()
    while len(taken) < BLOCKS and (len(taken) < 3 or time.perf_counter() - start < MOST_SECONDS / 4):
        taken.append(timed(count))
    return 1000 * median(taken)


def fastest(row: Row, device: torch.device) -> tuple[float, str]:
    """Milliseconds in the fastest form, and which it is."""
    shape = shape_of(row.setting.data)
    with torch.device("meta"):
        convolutional = any(isinstance(m, nn.Conv2d) for m in build(row.setting.model, shape).modules())
    layouts = (False, True) if convolutional else (False,)
    found = []
    for sgd, channels_last in product(("foreach", "fused"), layouts):
        taken = milliseconds(trainer(row, device, {sgd: True}, channels_last), device)
        found.append((taken, f"{sgd}{', channels last' if channels_last else ''}"))
    return min(found)


def main(arguments: Sequence[str]) -> int:
    """Time the rows; returns the exit code."""
    parser = parser_of("python -m benchmarks plain", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--row", dest="rows", action="append", help="by name; may be repeated; all if left out")
    parser.add_argument("--quick", action="store_true", help="the rows of the suite's --quick")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="results.json of the suite")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    cells = json.loads(asked.compare.read_text())["cells"] if asked.compare else {}
    far = 0
    for row in rows_for(device.type, quick=asked.quick, wanted=asked.rows):
        taken, form = fastest(row, device)
        line = f"{row.name:18} {taken:10.3f} ms  {form}"
        theirs = cells.get(row.name, {}).get("columns", {}).get("non-private", {}).get("seconds")
        if theirs is not None:
            off = 1000 * theirs / taken - 1
            far += abs(off) > TOLERANCE
            line += f"; the suite's plain step: {1000 * theirs:.3f} ms, {off:+.1%}"
        print(line, flush=True)
    if far:
        print(f"{far} rows are further off than {TOLERANCE:.0%}", file=sys.stderr)
    return 1 if far else 0
