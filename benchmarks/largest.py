"""The largest batch that fits into a given memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.methods import steps_by, synchronize
from benchmarks.workload import Setting, make_workload
from experiments.harness.limits import is_out_of_memory

PAPER_GIB = 11.0  # the memory of the paper's card, a GeForce 1080 Ti


def largest(fits: Callable[[int], bool], start: int = 8, most: int = 4096) -> int:
    """The largest n <= most with fits(n), by doubling and bisection; 0 if not even 1 fits.

    Assumes that `fits` is true up to some n and false beyond.
    """
    good, bad = 0, start
    while fits(bad):
        good, bad = bad, min(2 * bad, most + 1)
        if good >= most:
            return most
        if bad > most:
            break
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def largest_batch(setting: Setting, method: str, device: torch.device, seed: int) -> int:
    """The largest batch with which two steps (the first creates optimizer state) fit into the paper's card."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, PAPER_GIB * 2**30 / total), device)
    try:
        return largest(lambda batch: _fits(replace(setting, batch=batch), method, device, seed))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _fits(setting: Setting, method: str, device: torch.device, seed: int) -> bool:
    try:
        with steps_by(method, make_workload(setting, device, seed)) as step:
            for _ in range(2):
                step()
            synchronize(device)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()  # an error's frames hold tensors
        torch.cuda.empty_cache()
