"""One cell of the grid: one setting with one method, measured or with the reason of the failure."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.largest import PAPER_GIB, largest_batch
from benchmarks.memory import NoMemoryFigure, peak_memory
from benchmarks.methods import REFERENCE, settling_steps, steps_by, synchronize
from benchmarks.timing import Effort, Timing, interleave, settled
from benchmarks.workload import Setting, make_workload
from clipwise.gradients import FallbackWarning
from experiments.harness.limits import reason_of, time_limit

Cell = dict[str, Any]


@contextmanager
def outcome_in(cell: Cell, most_seconds: float) -> Iterator[None]:
    """Record a failed or too slow measurement as the cell's `failed`, and clipwise's warnings as its `notes`.

    Call `tidy` afterwards: inside the context the error still holds its tensors.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with time_limit(most_seconds):
                yield
        except NoMemoryFigure as failure:
            cell["failed"] = str(failure)
        except Exception as error:
            cell["failed"] = reason_of(error)
    notes = {str(w.message) for w in caught if issubclass(w.category, FallbackWarning)}
    if notes:
        cell["notes"] = sorted(notes)


def measure(
    setting: Setting, method: str, device: torch.device, seed: int, effort: Effort, most_seconds: float
) -> Cell:
    """Measure peak memory, then time; or record the reason of a failure."""
    cell: Cell = {"setting": setting.key, "method": method}
    with outcome_in(cell, most_seconds):
        cell["peak_bytes"] = peak_memory(setting, method, device, seed, effort.cell_seconds)
        cell |= figures_of(_time(setting, method, device, seed, effort))
    tidy(device)
    return cell


def measure_largest(setting: Setting, method: str, device: torch.device, seed: int, most_seconds: float) -> Cell:
    """The largest batch that fits into the memory of the paper's card."""
    cell: Cell = {"setting": setting.key, "method": method, "memory_gib": PAPER_GIB}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with time_limit(most_seconds):
                cell["largest_batch"] = largest_batch(setting, method, device, seed)
        except Exception as error:
            cell["failed"] = reason_of(error)
    tidy(device)
    return cell


def _time(setting: Setting, method: str, device: torch.device, seed: int, effort: Effort) -> Timing:
    wait = partial(synchronize, device)
    with ExitStack() as stack:
        contenders = {}
        for role, name in (("method", method), ("reference", REFERENCE)):
            step = stack.enter_context(steps_by(name, make_workload(setting, device, seed)))
            contenders[role] = settled(step, settling_steps(name), effort.cell_seconds / 4, wait)
        return interleave(contenders, effort, wait).timing("method", "reference")


def figures_of(timing: Timing) -> Cell:
    """Times in plain types."""
    return {
        "seconds": timing.seconds,
        "lower_quartile": timing.lower,
        "upper_quartile": timing.upper,
        "reference_seconds": timing.reference_seconds,
        "ratio": timing.ratio,
        "rounds": timing.rounds,
    }


def tidy(device: torch.device) -> None:
    """Free the tensors that an error's frames hold, before the next cell is measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
