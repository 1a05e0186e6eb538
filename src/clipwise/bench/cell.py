"""One cell of the grid: one setting by one method, measured or with the reason why not."""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from clipwise.bench.largest import PAPER_GIB, largest_batch
from clipwise.bench.limits import reason_of, time_limit
from clipwise.bench.memory import NoMemoryFigure, peak_memory
from clipwise.bench.methods import REFERENCE, settling_steps, steps_by, synchronize
from clipwise.bench.timing import Effort, Timing, interleave
from clipwise.bench.workload import Setting, make_workload
from clipwise.gradients import FallbackWarning

Cell = dict[str, Any]


def measure(
    setting: Setting, method: str, device: torch.device, seed: int, effort: Effort, most_seconds: float
) -> Cell:
    """Peak memory first, then time. A method that fails is a result too: it has `failed`, the reason."""
    cell: Cell = {"setting": setting.key, "method": method}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with time_limit(most_seconds):
                cell["peak_bytes"] = peak_memory(setting, method, device, seed, effort.cell_seconds)
                cell |= _figures(_time(setting, method, device, seed, effort))
        except NoMemoryFigure as failure:
            cell["failed"] = str(failure)
        except Exception as error:
            cell["failed"] = reason_of(error)
    notes = {str(w.message) for w in caught if issubclass(w.category, FallbackWarning)}
    if notes:
        cell["notes"] = sorted(notes)
    _tidy(device)
    return cell


def measure_largest(
    setting: Setting, method: str, device: torch.device, seed: int, most_seconds: float
) -> Cell:
    """The largest batch in the memory of the paper's card."""
    cell: Cell = {"setting": setting.key, "method": method, "memory_gib": PAPER_GIB}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with time_limit(most_seconds):
                cell["largest_batch"] = largest_batch(setting, method, device, seed)
        except Exception as error:
            cell["failed"] = reason_of(error)
    _tidy(device)
    return cell


def _time(setting: Setting, method: str, device: torch.device, seed: int, effort: Effort) -> Timing:
    with ExitStack() as stack:
        step, reference = (
            stack.enter_context(steps_by(name, make_workload(setting, device, seed)))
            for name in (method, REFERENCE)
        )
        return interleave(step, reference, effort, partial(synchronize, device), settling_steps(method))


def _figures(timing: Timing) -> Cell:
    return {
        "seconds": timing.seconds,
        "lower_quartile": timing.lower,
        "upper_quartile": timing.upper,
        "reference_seconds": timing.reference_seconds,
        "ratio": timing.ratio,
        "rounds": timing.rounds,
    }


def _tidy(device: torch.device) -> None:
    """An error's frames hold tensors: let them go before the next cell is measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
