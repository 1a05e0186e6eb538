"""Pieces of pages of results: rows of runs, accuracies with their errors, epsilons, commands and environments."""

from __future__ import annotations

import math
import statistics

from clipwise.accounting.composition import SMALLEST_NOISE
from clipwise.privacy import rounded_up
from experiments.harness.store import Cell, Store

_NO_PRIVACY = 20.0  # an epsilon above this gives no useful guarantee


def in_short(cell: Cell) -> str:
    """A run in one line."""
    if "accuracy" not in cell:
        return _why_none(cell)
    speed = f" ({1000 * cell['seconds'] / cell['steps']:.1f} ms per step)" if cell.get("steps") else ""
    cost = epsilon([cell])
    cost = f"epsilon {cost}" if cell.get("epsilon") is not None else cost
    return f"{cell['accuracy']:.1%}, {cost}, {cell['seconds']:.0f} s{speed}"


def accuracy(cells: list[Cell]) -> str:
    """Mean and standard error in percent, or the reason why there is none."""
    found = accuracies(cells)
    if not found:
        return _why_none(cells[0]) if cells else "not run"
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{statistics.fmean(found):.2f} ± {standard_error(found):.2f}"


def accuracies(cells: list[Cell]) -> list[float]:
    """The accuracies of finished runs, in percent."""
    return [100 * cell["accuracy"] for cell in cells if "accuracy" in cell]


def standard_error(found: list[float]) -> float:
    """s / sqrt(n); 0 for a single run."""
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def epsilon(cells: list[Cell]) -> str:
    """The largest epsilon that a run spent."""
    found = [cell["epsilon"] for cell in cells if cell.get("epsilon") is not None]
    if not found:
        return next((str(cell["why_no_epsilon"]) for cell in cells if "why_no_epsilon" in cell), "")
    noise = [cell["noise_multiplier"] for cell in cells if "noise_multiplier" in cell]
    return epsilon_text(max(found), min(noise, default=math.inf))


def epsilon_text(value: float, noise_multiplier: float = math.inf) -> str:
    """An epsilon, with marks if it gives no useful guarantee and if it is not by PLD."""
    if value < _NO_PRIVACY:
        return rounded_up(value)
    if noise_multiplier < SMALLEST_NOISE:
        return f"at most {value:.3g} (not PLD): none in effect"
    return f"{value:.3g}: none in effect"


def how(store: Store) -> list[str]:
    """Commands, hardware and versions."""
    lines = [*(f"    {command}" for command in store.commands), ""]
    used = {cell["environment"] for cell in store.cells.values()}
    places = (_environment(e) for place, e in enumerate(store.environments) if place in used)
    return [*lines, f"On {'; '.join(dict.fromkeys(places))}.", ""] if used else lines


def _environment(found: dict[str, object]) -> str:
    versions = found["versions"]
    assert isinstance(versions, dict)
    machine = f"{found['gpu']}, {found['cores']} cores" if "gpu" in found else f"{found['cpu']}"
    parts = [machine, f"Python {found['python']}", *(f"{name} {v}" for name, v in versions.items())]
    return ", ".join([*parts, "TF32 products"] if found.get("cudnn_allow_tf32") else parts)


def _why_none(cell: Cell) -> str:
    if "unfinished" not in cell:
        return str(cell["failed"])
    curve = cell.get("public_accuracy_by_epoch", [])
    if not curve:
        return "unfinished"
    return f"unfinished: {100 * curve[-1]:.1f} on the public tenth after {len(curve)} epochs"
