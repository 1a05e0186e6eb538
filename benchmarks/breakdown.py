"""Where a private step spends more time than plain training, per kernel or per operation.

    python -m benchmarks breakdown --device cuda --row vit-b16 --row gpt2-256 --out FILE.md
    python -m benchmarks breakdown --device cpu --row cnn --row lstm --method auto --out FILE.md

The rows are those of `python -m benchmarks peers`, in the form in which plain training is fastest. After warm-up,
torch's profiler traces a few steps of plain training and of one method. On CUDA the times are those of kernels, and
`bound` is the time that the device is busy, whatever the host does. On a CPU they are the times of operations in the
calling thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import REFERENCE, settling_steps, steps_by, synchronize
from benchmarks.peers.form import fastest_form
from benchmarks.peers.rows import rows_for
from benchmarks.workload import Setting, make_workload
from experiments.harness.command import parser_of
from experiments.harness.environment import at_its_best, device_of, environment

STEPS = 3
SHOWN = 14
_NAME = 90  # characters of a kernel's name


def traced(setting: Setting, method: str, device: torch.device) -> tuple[Counter[str], Counter[str]]:
    """Milliseconds per step and calls per step, for each kernel or operation."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with steps_by(method, make_workload(setting, device, 0)) as step:
        for _ in range(settling_steps(method)):
            step()
        synchronize(device)
        with profile(activities=[activity]) as seen:
            for _ in range(STEPS):
                step()
            synchronize(device)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in seen.key_averages():
        micro = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if micro > 0:
            name = event.key.replace("|", "/")[:_NAME]
            times[name] += micro / 1e3 / STEPS
            calls[name] += event.count / STEPS
    return times, calls


def section(title: str, setting: Setting, method: str, device: torch.device) -> list[str]:
    """The differences, the largest first."""
    plain, plain_calls = traced(setting, REFERENCE, device)
    own, own_calls = traced(setting, method, device)
    whole = f"{own.total():.2f} against {plain.total():.2f} ms per step: {own.total() / plain.total():.3f}"
    lines = [
        f"## {title}: {method} against plain",
        "",
        f"{whole}, in {own_calls.total():.0f} against {plain_calls.total():.0f} calls.",
        "",
        "| more, ms | ms | calls | plain, ms | calls | what |",
        "| ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    by_size = sorted({*own, *plain}, key=lambda name: -abs(own[name] - plain[name]))
    for name in by_size[:SHOWN]:
        numbers = (own[name] - plain[name], own[name], own_calls[name], plain[name], plain_calls[name])
        cells = [f"{n:+.3f}" if i == 0 else f"{n:.3f}" if i in (1, 3) else f"{n:.0f}" for i, n in enumerate(numbers)]
        lines.append(f"| {' | '.join(cells)} | `{name}` |")
    rest = sum(own[name] - plain[name] for name in by_size[SHOWN:])
    return [*lines, f"| {rest:+.3f} | | | | | all others together |", ""]


def main(arguments: Sequence[str]) -> int:
    """Trace the selected rows and write a page."""
    parser = parser_of("python -m benchmarks breakdown", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--row", dest="rows", action="append", required=True, help="a row of the table; may be repeated"
    )
    parser.add_argument("--method", default=None, help="a column; by default compiled on CUDA, else auto")
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    method = options.method or ("compiled" if device.type == "cuda" else "auto")
    made_by = f"python -m benchmarks breakdown --device {device.type} --method {method} " + " ".join(
        f"--row {row}" for row in options.rows
    )
    made_by += f" --out {options.out}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with at_its_best(device):
        found = environment(device)
    versions = ", ".join(f"{k} {v}" for k, v in found.pop("versions").items())
    lines = ["# Where the time goes", "", "Made by:", "", f"    {made_by}", ""]
    lines += [*(f"- {key}: {value}" for key, value in found.items()), f"- {versions}", ""]
    with at_its_best(device):
        for row in rows_for(device.type, wanted=options.rows):
            lines += section(row.title, fastest_form(row.setting, device, 0), method, device)
            options.out.write_text("\n".join(lines))  # keep the finished sections if the next row fails
            print(f"{row.title}: done", flush=True)
    return 0
