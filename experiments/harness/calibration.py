"""Noise multipliers for budgets, cached: many trials share a rate, a number of steps and an epsilon."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from clipwise import accounting
from clipwise.ledger.durable_files import replace_file


def multiplier(epsilon: float, delta: float, sample_rate: float, steps: int, folder: Path | None = None) -> float:
    """The noise multiplier with which `steps` Poisson steps are (epsilon, delta)-private.

    Args:
        folder: a cache that processes share.
    """
    return _found(epsilon, delta, sample_rate, steps, None if folder is None else str(folder))


@lru_cache(maxsize=4096)
def _found(epsilon: float, delta: float, sample_rate: float, steps: int, folder: str | None) -> float:
    asked = {"epsilon": epsilon, "delta": delta, "sample_rate": sample_rate, "steps": steps}
    if folder is None:
        return accounting.noise_multiplier(**asked)  # type: ignore[arg-type]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    file = Path(folder) / f"noise-{name}.json"
    if file.exists():
        return float(json.loads(file.read_text())["noise_multiplier"])
    found = accounting.noise_multiplier(**asked)  # type: ignore[arg-type]
    text = json.dumps(asked | {"noise_multiplier": found})
    replace_file(file, lambda handle: handle.write(text.encode()), mode=0o644)
    return found
