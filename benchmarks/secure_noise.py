"""The cost of secure noise next to standard noise, on this CPU.

    python -m benchmarks secure-noise --threads 1 --out benchmarks/results/secure-noise/cpu.md

`draw` is the noise alone. `release` is what a step does with a sum: noise, addition, division, and for secure noise
the rounding. The two kinds are timed in turns, so that other load on the machine affects both. A figure is the median
of all rounds. The standard deviation over the grid step is that of a part of as many coordinates, at multiplier 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from clipwise.noise.mechanism import noised
from clipwise.noise.secure import noised_on_grid, on_grid, rounded_gaussian
from clipwise.privacy import Part
from experiments.harness.command import parser_of
from experiments.harness.environment import environment

SIZES = (1_000, 30_000, 1_000_000, 10_000_000)
SECONDS = 8.0  # for each size and thing to measure


def standard_release(total: Tensor, part: Part, key: bytes) -> list[Tensor]:
    """A sum with standard noise, over a constant."""

    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        return gaussian(key, size, part.noise_std, dtype=dtype, onto=onto, divisor=divisor)

    return noised([total], draw, 256.0)


def secure_release(total: Tensor, part: Part, key: bytes) -> list[Tensor]:
    """The same with secure noise."""

    def draw(bucket: int, size: int) -> Tensor:
        return rounded_gaussian(key, size, part.noise_std / part.grid)

    return noised_on_grid([total], draw, 256.0, part.grid)


def taking_turns(*acts: Callable[[], object]) -> list[float]:
    """The median milliseconds of each function, called in turns."""
    for act in acts:
        act()
    times: list[list[float]] = [[] for _ in acts]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[0]) < 5:
        for act, found in zip(acts, times, strict=True):
            start = time.perf_counter()
            act()
            found.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(found) for found in times]


def row(size: int) -> str:
    """A line of the table."""
    key = NoiseKey.fresh()
    (part,) = on_grid([Part("all", ("w",), 1.0, 1.0)], {"w": size})
    total = torch.randn(size)

    def fresh() -> bytes:
        key.advance()
        return key.derive("noise")

    ratio = part.noise_std / part.grid
    draws = taking_turns(lambda: gaussian(fresh(), size, 1.0), lambda: rounded_gaussian(fresh(), size, ratio))
    releases = taking_turns(
        lambda: standard_release(total, part, fresh()), lambda: secure_release(total, part, fresh())
    )
    cells = [f"{a:.3f} | {b:.3f} | {b / a:.2f}" for a, b in (draws, releases)]
    return f"| {size:,} | {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> None:
    """Measure, print and keep the table."""
    parser = parser_of("python -m benchmarks secure-noise", __doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lines = [
        "# Secure noise beside standard noise",
        "",
        f"Milliseconds, {options.threads} thread(s); medians of rounds that take turns. "
        "`python -m benchmarks secure-noise`.",
        "",
        "| numbers | draw, standard | draw, secure | ratio | release, standard | release, secure | ratio |",
        "|---|---|---|---|---|---|---|",
        *map(row, SIZES),
        "",
        ", ".join(f"{name} {value}" for name, value in environment(torch.device("cpu")).items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
