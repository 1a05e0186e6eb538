"""The exactness table on a GPU, without pytest: `python -m tests.gpu.exactness [PART OF A NAME ...]`.

Compares every case, with every method, in float32 and float64, with a forward and backward pass per example in float64
on the same device. Prints failures and uses of the fallback; exit code 1 if there are any.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter

import torch

from clipwise.gradients import METHODS, FallbackWarning, Memory, per_example_gradients
from tests.gradients.cases import CASES, Case, losses, oracle, trainable

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def error_of(case: Case, method: str, dtype: torch.dtype) -> float:
    """The largest error of norms, sums and gradients, in units of the tolerance."""
    model = case.build(dtype).cuda()
    memory, worst = Memory(), 0.0
    for seed in range(3):
        inputs = tuple(x.cuda() for x in case.draw(6, dtype, seed))
        found = per_example_gradients(losses(model, inputs), trainable(model), memory, method)
        squares, ours = found.squared_norms(), found.instantiate(slice(0, 6))
        sums = found.weighted_sums(dict.fromkeys(ours, torch.ones(6, dtype=torch.float64, device="cuda")))
        truth = oracle(case.build(dtype).cuda(), inputs)
        scale = max(float(g.reshape(len(g), -1).norm(dim=1).max()) for g in truth.values())
        for name, expected in truth.items():
            errors = (
                (ours[name].double() - expected).abs().max(),
                (squares[name].sqrt() - expected.reshape(len(expected), -1).norm(dim=1)).abs().max(),
                (sums[name].double() - expected.sum(0)).abs().max() / 6,
            )
            worst = max(worst, *(float(e) / scale for e in errors))
    return worst / TOLERANCE[dtype]


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begin, failed, slow = time.monotonic(), [], Counter[str]()
    cases = [c for c in CASES if not sys.argv[1:] or any(part in c.name for part in sys.argv[1:])]
    for case in cases:
        for dtype in TOLERANCE:
            for method in METHODS:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", FallbackWarning)
                    try:
                        error = error_of(case, method, dtype)
                    except Exception as problem:
                        failed.append(f"{case.name} {method} {dtype}: {type(problem).__name__} {problem}")
                        continue
                if not error <= 1:
                    failed.append(f"{case.name} {method} {dtype}: error {error:.2g} times the tolerance")
                announced = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
                if announced and not case.fallback:
                    slow[f"{case.name}: {announced[0].split(' has no rule')[0]}"] += 1
    print(f"{len(cases)} cases x {len(METHODS)} methods x 2 dtypes on {torch.cuda.get_device_name()}")
    for line, times in slow.items():
        print(f"slow ({times}): {line}")
    for line in failed:
        print("FAILED", line[:300])
    bad = len(failed) + len(slow)
    print(f"{len(cases) * len(METHODS) * len(TOLERANCE)} checks, {bad} failed, {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
