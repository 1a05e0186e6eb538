"""Bugs found in published code, one per file, planted by patching. The registry is the source of the table."""

from __future__ import annotations

from importlib import import_module

from tests.audit.bug import Bug

FILES = (
    "noise_over_batch_size",
    "noise_forgotten",
    "missing_root",
    "mean_for_sum",
    "drawn_divisor",
    "whole_lot_statistics",
    "running_statistics",
    "shuffled_as_poisson",
    "reused_key",
    "cut_tail",
    "key_in_checkpoint",
    "cancelled_gram",
    "clip_after_averaging",
    "dropped_repeats",
    "tied_once",
)
BUGS: dict[str, Bug] = {file: import_module(f"{__name__}.{file}").BUG for file in FILES}
