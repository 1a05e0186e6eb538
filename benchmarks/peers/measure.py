"""One row of the table: the memory of each column, and the times of all in turns.

On a CPU the memory is measured first, each column alone. On CUDA it is measured when a column is set up for the timing,
so that nothing is compiled twice.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.cell import Cell, figures_of, outcome_in, tidy
from benchmarks.memory import NoMemoryFigure, held, peak_memory, peak_of
from benchmarks.methods import (
    GRAPHED,
    OPACUS,
    PLAIN_AND_NOISE,
    PLAIN_COMPILED,
    REFERENCE,
    settling_steps,
    steps_by,
    synchronize,
    unavailable,
)
from benchmarks.peers.form import fastest_form
from benchmarks.peers.rows import Row
from benchmarks.peers.targets import MEMORY, TIME
from benchmarks.timing import Contender, Effort, Rounds, interleave, settled
from benchmarks.workload import Setting, make_workload
from experiments.harness.limits import TooSlow, reason_of

BASES = (REFERENCE, PLAIN_AND_NOISE, GRAPHED, PLAIN_COMPILED)
_DENOMINATORS = (*BASES, *OPACUS)


def measure_row(
    row: Row, columns: list[str], device: torch.device, seed: int, effort: Effort, most_seconds: float
) -> Cell:
    """Measure a row: `columns` holds the figures of each column, or `failed` with the reason.

    If plain training fails or the row takes too long, the row itself has `failed`.
    """
    cell: Cell = {"row": row.name, "setting": row.setting.key}
    with outcome_in(cell, most_seconds):
        setting = fastest_form(row.setting, device, seed)
        cell |= {"optimizer": setting.optimizer, "channels_last": setting.channels_last}
        cell["columns"] = _columns(setting, columns, device, seed, effort)
    tidy(device)
    return cell


def _columns(setting: Setting, columns: list[str], device: torch.device, seed: int, effort: Effort) -> dict[str, Cell]:
    """The figures of each column; `columns` includes the reference."""
    found: dict[str, Cell] = {}
    for name in columns:
        reason = unavailable(name, device)
        if reason:
            found[name] = {"failed": reason}
        else:
            found[name] = {} if device.type == "cuda" else _memory(setting, name, device, seed, effort)
    rounds = _rounds(setting, found, device, seed, effort)
    plain = found[REFERENCE]["peak_bytes"]
    for name in rounds.seconds:
        figures = found[name]
        figures |= figures_of(rounds.timing(name, REFERENCE))
        figures[f"{TIME}_over"] = {base: rounds.ratio(name, base) for base in _DENOMINATORS if base in rounds.seconds}
        if plain and figures["peak_bytes"]:
            figures[f"{MEMORY}_over"] = {REFERENCE: figures["peak_bytes"] / plain}
    return found


def _memory(setting: Setting, name: str, device: torch.device, seed: int, effort: Effort) -> Cell:
    seconds = 16 * effort.cell_seconds  # the first steps, whose checks take memory too, get a quarter of it
    try:
        return {"peak_bytes": peak_memory(setting, name, device, seed, seconds)}
    except Exception as error:
        reason = _own_reason(name, error)
    tidy(device)
    return {"failed": reason}


def _rounds(setting: Setting, found: dict[str, Cell], device: torch.device, seed: int, effort: Effort) -> Rounds:
    """Time all columns that did not fail, on the same data. A column that fails here gets its reason."""
    wait = partial(synchronize, device)
    shared = make_workload(setting, device, seed)
    data = shared.inputs.nbytes + shared.targets.nbytes
    contenders: dict[str, Contender] = {}
    with ExitStack() as stack:
        for name in [name for name, figures in found.items() if "failed" not in figures]:
            attempt = ExitStack()
            try:
                before = held(device) if device.type == "cuda" else 0
                workload = make_workload(setting, device, seed)
                own = replace(workload, inputs=shared.inputs, targets=shared.targets)
                step = attempt.enter_context(steps_by(name, own))
                del workload
                contenders[name] = settled(step, settling_steps(name), math.inf, wait)
                if device.type == "cuda":
                    found[name] = {"peak_bytes": peak_of(step, device) - before + data}
                stack.push(attempt)
            except Exception as error:
                attempt.close()
                found[name] = {"failed": _own_reason(name, error)}
                tidy(device)
        return interleave(contenders, effort, wait)


def _own_reason(name: str, error: Exception) -> str:
    """Why a column has no figures. Raises if the whole row fails: plain training failed, or the time is up."""
    if name == REFERENCE or isinstance(error, TooSlow):
        raise error
    return str(error) if isinstance(error, NoMemoryFigure) else reason_of(error)


def failures(cell: Cell) -> dict[str, Any]:
    """The reasons of failed columns, by column."""
    return {name: column["failed"] for name, column in cell.get("columns", {}).items() if "failed" in column}
