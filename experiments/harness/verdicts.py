"""Verdicts on claims, and the evidence that a page needs before it prints one."""

from __future__ import annotations

from collections.abc import Iterable

SEEDS = 3
TRIALS_PER_DIMENSION = 2
NOT_TESTED = "Not tested"


def survival(kept: int, count: int) -> str:
    """The verdict on a claim that should hold in all of `count` places."""
    if kept == count:
        return "Survives"
    return "Survives in part" if kept else "Does not survive"


def lacking(
    seeds: int, trials: int, dimensions: int, epochs: int | None = None, epochs_in_paper: int | None = None
) -> str:
    """The missing evidence in words; empty if there is enough.

    Args:
        seeds: the smallest number of tested runs of a row.
        trials: the smallest number of settings tried for a row; 1 means no search.
        dimensions: the largest number of dimensions of the search space.
        epochs: the epochs of a run.
        epochs_in_paper: a run with fewer epochs is another experiment.
    """
    found = []
    if seeds < SEEDS:
        found.append("one seed" if seeds == 1 else f"{seeds} seeds")
    if epochs is not None and epochs_in_paper is not None and epochs < epochs_in_paper:
        found.append(f"{epochs} of {epochs_in_paper} epochs")
    if trials <= 1:
        found.append("one learning rate")
    elif trials < TRIALS_PER_DIMENSION * dimensions:
        found.append(f"{trials} trials in {dimensions} dimensions")
    return ", ".join(found)


def in_brackets(found: Iterable[str]) -> str:
    """A list in brackets; empty if there is nothing in it."""
    listed = ", ".join(found)
    return f" ({listed})" if listed else ""


def as_list(sentences: Iterable[str]) -> list[str]:
    """A Markdown list and an empty line; nothing for no sentences."""
    lines = [f"- {sentence}" for sentence in sentences]
    return [*lines, ""] if lines else []
