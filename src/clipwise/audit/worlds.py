"""Two worlds, with a canary and without: runs in the one and the other by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from clipwise.accounting.gaussian import Array
from clipwise.audit.neighbours import MakeRun
from clipwise.audit.planted import Planted
from clipwise.engine.observer import observing
from clipwise.errors import AuditError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Entry

# From a key, whether the canary is in, and further keys to noise each release with.
MakeWatch = Callable[[NoiseKey, bool, Sequence[NoiseKey]], Planted]


@dataclass
class Worlds:
    """Runs with the canary and without it.

    Args:
        make_run: trains on a data set.
        inside, outside: the data sets of the two worlds. The second is for replace-one only: elsewhere who is out is
            left out of every draw of the first.
        make_watch: who looks on.
        seed: of the keys, and of torch's generator before each run.
    """

    make_run: MakeRun
    inside: Any
    outside: Any
    make_watch: MakeWatch
    seed: int
    _watches: list[Planted] = field(default_factory=list)
    _histories: list[list[Entry]] = field(default_factory=list)

    def scores(self, runs: int) -> tuple[Array, Array]:
        """Scores of so many runs with the canary, and of as many without."""
        self._run()
        self._run()
        if is_one_release(self._histories[0]):
            # Without chance in the draw the sum is always the same: only the noise is drawn anew.
            for world in range(2):
                self._run([self._key(number) for number in range(4 + world, 2 * runs, 2)])
        else:
            while len(self._watches) < 2 * runs:
                self._run()
        found = [
            np.array([s[0] for w in self._watches[world::2] for s in (w.scores, *w.more)]) for world in (0, 1)
        ]
        return found[0][:runs], found[1][:runs]

    def history(self) -> tuple[Entry, ...]:
        """What every run charged, which must be the same."""
        first = self._histories[0]
        if any(other != first for other in self._histories):
            raise AuditError(
                "make_run charges another history from one call to the next: an audit compares runs that promise the "
                "same."
            )
        return tuple(first)

    @property
    def delta(self) -> float:
        """That of the runs."""
        run = self._watches[0].run
        assert run is not None
        return run.plan.delta

    def _key(self, number: int) -> NoiseKey:
        return NoiseKey.from_seed(self.seed, f"clipwise.canary/{number}".encode())

    def _run(self, again: Sequence[NoiseKey] = ()) -> None:
        number = len(self._watches)
        is_inside = number % 2 == 0
        watch = self.make_watch(self._key(number), is_inside, again)
        is_replaced = bool(number) and self._histories[0][0].event.adjacency is Adjacency.REPLACE_ONE
        data = self.outside if is_replaced and not is_inside else self.inside
        self._histories.append(trained(self.make_run, data, watch, self.seed))
        self._watches.append(watch)


def is_one_release(history: Sequence[Entry]) -> bool:
    """A run of a single step that everyone takes part in."""
    return sum(entry.count for entry in history) == 1 and history[0].event.sample_rate == 1


def trained(make_run: MakeRun, dataset: Any, watch: Planted, seed: int) -> list[Entry]:
    """One run under a watch; returns what it charged."""
    with torch.random.fork_rng(devices=[]), observing(watch):
        torch.manual_seed(seed)
        make_run(dataset)
    if watch.run is None:
        raise AuditError(
            "make_run made no private run: it must call clipwise.make_private on the data set it is given."
        )
    history = watch.run.ledger.history()
    if not history:
        raise AuditError("make_run made no step: there is nothing to measure.")
    return history
