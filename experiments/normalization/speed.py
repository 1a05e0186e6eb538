"""Figure 1 in numbers: the number of epochs until the validation accuracy is near that without noise.

The learning rate is the same for all noises, as in the paper. A normalized network does not change if weights, noise
and rate grow by the same factor, so a larger rate compensates larger noise. The table has a line for each rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from experiments.harness.store import Store
from experiments.normalization.tables import FIGURE_1, Table

NEAR = 0.02  # below the best accuracy without noise
CURVE = "validation_accuracy_by_epoch"
Curves = dict[float, list[float]]  # by noise


def curves(table: Table, store: Store, family: str, trial: int) -> Curves:
    """The mean accuracy after each epoch over all runs with one trial's rate, by noise."""
    found: Curves = {}
    for value in table.values:
        key = table.tried(family, FIGURE_1[table.name], value)[trial].key
        runs = [cell[CURVE] for cell in store.cells.values() if cell["setting"] == key and CURVE in cell]
        if runs:
            found[value] = [statistics.fmean(epoch) for epoch in zip(*runs, strict=True)]
    return found


def epochs_to(target: float, accuracies: Sequence[float]) -> int | None:
    """The number of epochs until the target is reached; None if never."""
    return next((epoch for epoch, value in enumerate(accuracies, 1) if value >= target), None)


def lines(table: Table, store: Store) -> Iterator[str]:
    """A Markdown table of epochs by noise, and a comparison of noise 10 with noise 1."""
    yield "| network, learning rate | " + " | ".join(f"noise {value:g}" for value in table.values) + " |"
    yield "|---" * (1 + len(table.values)) + "|"
    remarks = []
    for family in table.families:
        by_trial = [curves(table, store, family, trial) for trial in range(len(table.trials))]
        target = max((max(c[0.0]) for c in by_trial if 0.0 in c), default=1.0) - NEAR
        for trial, found in zip(table.trials, by_trial, strict=True):
            name = f"{family}, {FIGURE_1[table.name]}, rate {trial['learning_rate']:g}"
            epochs = {value: epochs_to(target, accuracies) for value, accuracies in found.items()}
            words = (str(epochs[v] or f"not in {len(found[v])}") if v in epochs else "not run" for v in table.values)
            yield f"| {name} | " + " | ".join(words) + " |"
            remarks += _slower(name, epochs)
    yield from ["", *remarks] if remarks else []


def _slower(name: str, epochs: dict[float, int | None]) -> list[str]:
    """The paper's comparison of noise 1 and 10, in these runs."""
    fast, slow = epochs.get(1.0), epochs.get(10.0)
    if fast is None or 10.0 not in epochs:
        return []
    cost = "does not get there" if slow is None else f"takes {slow / fast:.1f} times as many epochs"
    return [f"- {name}: noise 10 {cost}, against noise 1 (paper: about 7 times)."]
