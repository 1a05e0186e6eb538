"""Runs checks without pytest, and prints the failures and the number of checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

Verdicts = Iterator[tuple[str, bool]]  # the name of a check, and whether it passed


def failures_of(checks: Sequence[Callable[[], Verdicts]]) -> int:
    """Run all. A check that raises counts as failed. The line with the numbers is printed last."""
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
