"""Several runs on the same data: what their ledgers say together.

Whoever sees the releases of two runs sees the releases of both, so their histories compose. That is right if the
runs share records, and says too much if they share none. How they are accounted for is in multi_run.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipwise.errors import ConfigurationError, LedgerError, PrivacyWarning
from clipwise.ledger import ledger
from clipwise.ledger.ledger import JSON, Ledger, Snapshot
from clipwise.privacy import Entry

_SERVED_TWICE = (
    "the noise of both cancels in the difference of what they release, and both draw the same batches. No guarantee "
    "covers them together."
)


@dataclass(frozen=True)
class Run:
    """One ledger file and what it says."""

    path: Path
    found: Snapshot


def read(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in these ledger files, or an error that says why they cannot be counted together."""
    if not paths:
        raise ConfigurationError("Give at least one ledger file.")
    runs = [Run(Path(path), ledger.read(path)) for path in paths]
    for number, run in enumerate(runs):
        for earlier in runs[:number]:
            _require_another(earlier, run)
    if not any(run.found.history for run in runs):
        names = " and ".join(str(run.path) for run in runs)
        raise LedgerError(f"{names} holds no release yet: nothing was spent.")
    _require_one_guarantee(runs)
    sizes = sorted(
        {run.found.header["dataset_size"] for run in runs if "dataset_size" in run.found.header}, key=str
    )
    if len(sizes) > 1:
        warnings.warn(
            f"the ledgers tell of data sets of different sizes ({', '.join(map(str, sizes))} records). Runs need "
            "to be counted together only as far as they share records; all of them are counted here.",
            PrivacyWarning,
            stacklevel=2,
        )
    return runs


def history(runs: Sequence[Run]) -> list[Entry]:
    """All releases of all runs, one ledger after the other.

    A run that went on from one checkpoint in two ledgers counts as two: its tag is made that of the file.
    """
    return [replace(entry, run=f"{run.found.run}/{entry.run}") for run in runs for entry in run.found.history]


def are_seeded(runs: Sequence[Run]) -> bool:
    """Whether noise and samples of any of them came from a given seed, so that no guarantee is claimed."""
    return any(about.get("seeded") is True for run in runs for about in run.found.about)


def _require_another(first: Run, second: Run) -> None:
    """Counting one run twice would say too much; two copies that differ, and nobody knows which to believe."""
    if os.path.samefile(first.path, second.path):
        raise ConfigurationError(f"{second.path} is given twice: name each ledger once.")
    if first.found.run == second.found.run:
        raise LedgerError(
            f"{first.path} and {second.path} are copies of one ledger (run {first.found.run}): give only the one "
            "that the run has written to last."
        )
    if _keys(first.found.about) & _keys(second.found.about):
        raise LedgerError(
            f"{first.path} and {second.path} have releases with the noise of one key: {_SERVED_TWICE} (If one of them "
            "goes on with the run of the other, it counts the releases of both: give only that one.)"
        )


def require_unused(key: str, ledger: Ledger) -> None:
    """Refuse a noise key, given by its id, that has served another run in this ledger."""
    if ledger.position and key in _keys(ledger.about):
        raise LedgerError(
            f"The ledger has releases of another run with the same noise key: {_SERVED_TWICE} Leave `seed` out, so "
            "that each run has a key of its own; or, for a test, give a ledger of its own."
        )


def _keys(about: Iterable[Mapping[str, JSON]]) -> set[JSON]:
    """The ids of the keys that runs have used; older versions recorded none."""
    return {key for each in about if isinstance(key := each.get("key"), str)}


def _require_one_guarantee(runs: Sequence[Run]) -> None:
    """Name the two files whose releases protect different things: no single guarantee covers both."""
    seen: dict[tuple[str, str], Path] = {}
    for run in runs:
        for entry in run.found.history:
            seen.setdefault((str(entry.event.adjacency), str(entry.event.unit)), run.path)
    if len(seen) > 1:
        (one, first), (other, second) = list(seen.items())[:2]
        where = f"{first} and {second} have" if first != second else f"{first} has"
        raise LedgerError(
            f"{where} releases under different adjacencies or units ({one[0]} of one {one[1]}, {other[0]} of one "
            f"{other[1]}), so no single guarantee covers them: count each on its own."
        )
