"""Runs checks one after another, without pytest: prints what fails, and how many there were."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

Verdicts = Iterator[tuple[str, bool]]  # what was checked, and whether it held


def failures_of(checks: Sequence[Callable[[], Verdicts]]) -> int:
    """Run all. A check that breaks counts as one that failed. The line with the numbers comes last."""
    begin, checked, failed = time.monotonic(), 0, 0
    for check in checks:
        try:
            for what, holds in check():
                checked += 1
                failed += not holds
                if not holds:
                    print("FAILED", what, flush=True)
        except Exception as problem:
            checked += 1
            failed += 1
            print("FAILED", check.__name__, type(problem).__name__, str(problem)[:500], flush=True)
    print(f"{checked} checks, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    return failed
