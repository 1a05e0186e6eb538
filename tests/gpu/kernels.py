"""The Triton kernels on a GPU, without pytest: `python -m tests.gpu.kernels [--check]`.

Times every kernel against torch's implementation, then checks it against float64 on fresh data and in a CUDA graph.
Prints a table of times and the failures; exit code 1 if there are any. `--check` skips the timing.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from clipwise.kernels import affine, gram, noise, squares, usable
from tests.gpu.verdicts import Verdicts, failures_of

DEVICE = "cuda"
ROUNDS = 15

GRAM_SHAPES = [  # B, T, m, n
    (4, 197, 100, 300),
    (40, 130, 768, 48),
    (2, 256, 768, 3072),
    (30, 50, 65, 33),
    (3, 20, 33, 50257),
    (1, 1100, 64, 40),
    (7, 3, 16, 16),
]
SUM_SHAPES = [(4, 197, 100), (3, 5, 7), (1, 1024, 70), (2, 1, 130), (64, 256, 768)]
IMAGES = [(4, 12, 4, 9), (3, 64, 32, 32), (5, 6, 6, 1), (2, 2, 2, 64)]  # B, C, G, side
ROWS = [(1, 3_000_001), (300, 3), (2, 4097), (5000, 768), (9, 1)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def cut_to_tf32(x: Tensor) -> Tensor:
    """The same numbers with 11 significant bits: the tensor cores read these exactly."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def norm_and_mass(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    left, right = left.double(), right.double()
    norm_B = torch.stack([torch.linalg.vector_norm(a.T @ b) for a, b in zip(left, right, strict=True)])
    return norm_B, (left.norm(dim=2) * right.norm(dim=2)).sum(1)


def check_gram() -> Verdicts:
    for shape in GRAM_SHAPES:
        B, T, m, n = shape
        plain = normal(B, T, m), normal(T, n, B).permute(2, 0, 1)  # the second with unfavourable strides
        left, right = normal(B, max(1, T // 2), m), normal(B, max(1, T // 2), n)
        cancelling = torch.cat([left, left], 1), torch.cat([right, -right * (1 + 1e-4)], 1)
        cases = {
            "plain": plain,
            "cancelling": cancelling,
            "cut": (cut_to_tf32(plain[0]), cut_to_tf32(plain[1].contiguous())),
            "positive cut": tuple(cut_to_tf32(x.abs().contiguous()) for x in plain),
            "bfloat16": tuple(x.bfloat16() for x in plain),
            "positive bfloat16": tuple(x.abs().bfloat16() for x in plain),  # truncated sums are all too small here
            "mixed": (plain[0].half(), plain[1]),
            "small": (plain[0] * 1e-21, plain[1]),
        }
        for name, rows in cases.items():
            norm_B, mass_B = norm_and_mass(*rows)
            for precision in ("tf32", "ieee"):
                square_B, bound_B = gram.gram_norms(*rows, precision)
                is_cut = precision == "tf32" and name in ("plain", "cancelling", "mixed", "small")
                slack_B = gram.OPERAND_ERROR * bound_B if is_cut else 0
                what = f"gram {shape} {name} {precision}"
                yield f"{what}: norm below the true one", bool((square_B.sqrt() + slack_B >= norm_B).all())
                yield f"{what}: mass below the true one", bool((bound_B >= mass_B).all())
                loose_B = square_B.sqrt() - norm_B - 1e-12 - slack_B
                # Cancelling terms: the bound is sqrt(2 gamma) of the mass, 2% for 4096 features per chunk.
                spare_B = 0.02 * mass_B if name == "cancelling" else 0.01 * norm_B
                yield f"{what}: loose norm", bool((loose_B <= spare_B).all())
                yield f"{what}: loose mass", bool((bound_B <= mass_B * 1.003 + 1e-9).all())
    left, right = normal(3, 150, 40), normal(3, 150, 50)
    left[1, 140, 3] = math.nan
    finite = gram.gram_norms(left, right, "ieee")[0].isfinite().tolist()
    yield "gram: a NaN is lost or spreads", finite == [True, False, True]


def is_close(found: Tensor, terms: Tensor, dim: int) -> bool:
    """Whether float32 sums of these terms are right up to rounding, which scales with their absolute values."""
    return bool(((found.double() - terms.sum(dim)).abs() <= 1e-5 * terms.abs().sum(dim)).all())


def check_affine() -> Verdicts:
    for shape in SUM_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            B, T, d = shape
            g, x = normal(B, T, d, dtype=dtype), normal(T, B, d, dtype=dtype).transpose(0, 1)
            mean, rstd = normal(B, T), normal(B, T).abs() + 0.5
            scale, shift = affine.layer_norm_sums(g, x, mean, rstd)
            terms = g.double() * (x.double() - mean.double()[..., None]) * rstd.double()[..., None]
            what = f"{shape} {dtype}"
            yield f"layer norm {what}", is_close(scale, terms, 1) and is_close(shift, g.double(), 1)
            scale, _ = affine.layer_norm_sums(g, x, None, rstd)
            yield f"rms norm {what}", is_close(scale, g.double() * x.double() * rstd.double()[..., None], 1)
            yield f"position sums {what}", is_close(affine.position_sums(g), g.double(), 1)
    for B, C, G, side in IMAGES:
        for order in (torch.contiguous_format, torch.channels_last):
            g, x = (normal(B, C, side, side).to(memory_format=order).flatten(2) for _ in range(2))
            mean, rstd = normal(B, G), normal(B, G).abs() + 0.5
            scale, shift = affine.group_norm_sums(g, x, mean, rstd)
            mean_C1, rstd_C1 = (s.double().repeat_interleave(C // G, 1)[..., None] for s in (mean, rstd))
            right = is_close(scale, g.double() * (x.double() - mean_C1) * rstd_C1, 2)
            yield f"group norm {(B, C, G, side)} {order}", right and is_close(shift, g.double(), 2)


def check_squares() -> Verdicts:
    for shape in ROWS:
        for scale in (1.0, 1e-30):
            x = normal(*reversed(shape)).T * scale
            found, true = squares.row_squares(x), x.double().square().sum(1)
            good = (found >= true * (1 - 1e-15)) & (found <= true * (1 + 1e-8))
            yield f"row squares {shape} times {scale}", bool(good.all())


def new_key() -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (4,), device=DEVICE)


def check_noise() -> Verdicts:
    key, size = new_key(), 1_000_001
    twin = noise.normals_in_torch(key, size, math.pi, torch.float64)
    found = noise.normals(key, size, math.pi, torch.float64)
    yield "noise: float64 is not the twin's", torch.allclose(found, twin, rtol=1e-13, atol=1e-14)
    rounded = noise.normals(key, size, math.pi, torch.float32)
    yield "noise: float32 is not float64 rounded", torch.equal(rounded, found.float())
    yield (
        "noise: a short draw does not begin a long one",
        torch.equal(noise.normals(key, 1001, math.pi, torch.float32), rounded[:1001]),
    )
    sums = torch.randn(1001, device=DEVICE)
    onto = noise.normals(key, 1001, math.pi, torch.float32, None, sums, 7.3)
    yield ("noise: put onto a sum is another noise", torch.allclose(onto, (rounded[:1001] + sums) / 7.3, 1e-6, 0))
    many = noise.normals(key, 2**26, 1.0, torch.float32)
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        moment = float(many.double().pow(power).mean())
        yield f"noise: moment {power} is {moment}", abs(moment - mean) < 5 * math.sqrt(variance / len(many))
    expected = len(many) * math.erfc(5 / math.sqrt(2))
    beyond = int((many.abs() > 5).sum())
    yield f"noise: {beyond} beyond 5, not {expected:.0f}", abs(beyond - expected) < 5 * math.sqrt(expected)


def check_graph() -> Verdicts:
    """Nothing synchronizes, all can be captured, and a replay reads a new key and repeats everything else."""
    key, left, right = new_key(), normal(8, 197, 64), normal(8, 197, 96)
    mean, rstd = normal(8, 197), normal(8, 197)

    def everything() -> tuple[Tensor, ...]:
        return (
            *gram.gram_norms(left, right, "tf32"),
            *gram.gram_norms(left, right, "ieee"),
            *affine.layer_norm_sums(left, left, mean, rstd),
            *affine.group_norm_sums(left, left, mean, rstd),
            affine.position_sums(right),
            squares.row_squares(right.flatten(1)),
            noise.normals(key, 1001, 1.0, torch.float32),
        )

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    graph.replay()
    same = [torch.equal(a, b) for a, b in zip(eager, captured, strict=True)]
    yield f"graph: results differ from eager ones: {same}", all(same)
    key.copy_(new_key())
    graph.replay()
    yield "graph: a new key is not read", not torch.equal(eager[-1], captured[-1])
    yield ("graph: replays differ", all(torch.equal(a, b) for a, b in zip(eager[:-1], captured[:-1], strict=True)))
    yield ("graph: noise differs from eager", torch.equal(captured[-1], noise.normals(key, 1001, 1.0, torch.float32)))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same from a CUDA graph: the device time, without Python's launch overhead."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Medians of both, alternating; a large write clears the cache before each."""
    flush = torch.empty(2**27, dtype=torch.int8, device=DEVICE)
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 3):
        for run, found in zip((ours, theirs), taken, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                found.append(begin.elapsed_time(end))
    return statistics.median(taken[0]), statistics.median(taken[1])


def grams_in_torch(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    square_B = ((left @ left.mT) * (right @ right.mT)).sum((1, 2))
    return square_B, (left.norm(dim=2) * right.norm(dim=2)).sum(1)


def row(name: str, ours: Callable[[], object], theirs: Callable[[], object], work: float, unit: str) -> None:
    """`work` is the work of one run, in units of the rate times a millisecond."""
    mine, other = milliseconds(captured(ours), captured(theirs))
    print(f"{name:<44}{mine:>9.3f} ms{other:>10.3f} ms {work / mine:>9.1f} {unit}")


def time_all() -> None:
    print(f"{'':<44}{'kernel':>12}{'torch':>13}")
    for precision in ("tf32", "ieee"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        for B, T, m, n in [(32, 256, 768, 3072), (32, 256, 768, 768), (16, 1024, 768, 3072), (128, 197, 768, 3072)]:
            left, right = normal(B, T, m), normal(B, T, n)
            row(
                f"gram {precision} B={B} T={T} {m}x{n}",
                lambda: gram.gram_norms(left, right, precision),
                lambda: grams_in_torch(left, right),
                2 * B * T * T * (m + n) / 1e9,
                "TFLOP/s (no symmetry)",
            )
    left, right = normal(32, 256, 768, dtype=torch.bfloat16), normal(32, 256, 3072, dtype=torch.bfloat16)
    row(
        "gram bfloat16 B=32 T=256 768x3072",
        lambda: gram.gram_norms(left, right, "tf32"),
        lambda: grams_in_torch(left, right),
        2 * 32 * 256**2 * 3840 / 1e9,
        "TFLOP/s (no symmetry)",
    )
    for B, T, d in [(32, 256, 768), (16, 1024, 768), (128, 197, 768)]:
        g, x, mean, rstd = normal(B, T, d), normal(B, T, d), normal(B, T), normal(B, T)
        row(
            f"layer norm B={B} T={T} d={d}",
            lambda: affine.layer_norm_sums(g, x, mean, rstd),
            lambda: affine.layer_norm_sums_in_torch(g, x, mean, rstd),
            8 * g.numel() / 1e6,
            "GB/s",
        )
    for order in (torch.contiguous_format, torch.channels_last):
        g, x = (normal(512, 64, 32, 32).to(memory_format=order).flatten(2) for _ in range(2))
        mean, rstd = normal(512, 8), normal(512, 8)
        row(
            f"group norm 512x64x32x32 {str(order).removeprefix('torch.')}",
            lambda: affine.group_norm_sums(g, x, mean, rstd),
            lambda: affine.group_norm_sums_in_torch(g, x, mean, rstd),
            8 * g.numel() / 1e6,
            "GB/s",
        )
    for B, T, p in [(32, 256, 3072), (512, 16, 64)]:
        g = normal(B, T, p)
        row(
            f"position sums {B}x{T}x{p}", lambda: affine.position_sums(g), lambda: g.sum(1), 4 * g.numel() / 1e6, "GB/s"
        )
    for R, n in [(32, 768 * 3072), (8192, 768)]:
        x = normal(R, n)
        row(
            f"row squares {R}x{n}",
            lambda: squares.row_squares(x),
            lambda: squares.row_squares_in_torch(x),
            4 * x.numel() / 1e6,
            "GB/s",
        )
    key, size = new_key(), 124_000_000
    row(
        f"noise {size}",
        lambda: noise.normals(key, size, 1.0, torch.float32),
        lambda: torch.randn(size, device=DEVICE),
        4 * size / 1e6,
        "GB/s",
    )


def main() -> int:
    if not usable(torch.zeros(1, device=DEVICE)):
        print("there is no Triton for this device")
        return 1
    torch.manual_seed(time.time_ns() % 2**32)
    torch.backends.cuda.matmul.allow_tf32 = False
    if "--check" not in sys.argv[1:]:
        time_all()
    checks = (check_gram, check_affine, check_squares, check_noise, check_graph)
    return 1 if failures_of(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
