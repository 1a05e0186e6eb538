"""Words for what is left of a claim, and what a comparison of runs needs before a page prints a verdict from it."""

from __future__ import annotations

from collections.abc import Iterable

SEEDS = 3
TRIALS_PER_DIMENSION = 2
NOT_TESTED = "Not tested"


def survival(kept: int, count: int) -> str:
    """What is left of a claim that should hold in all of `count` places."""
    if kept == count:
        return "Survives"
    return "Survives in part" if kept else "Does not survive"


def lacking(
    seeds: int, trials: int, dimensions: int, epochs: int | None = None, epochs_in_paper: int | None = None
) -> str:
    """What is missing, in words; empty if nothing is.

    Args:
        seeds: the fewest tested runs of a row.
        trials: the fewest settings that were tried for a row. One is a setting that was not searched.
        dimensions: the most dimensions of the space that they were chosen from.
        epochs: of a run; less than
        epochs_in_paper: is another experiment.
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
    """A list behind a number; nothing if it is empty."""
    listed = ", ".join(found)
    return f" ({listed})" if listed else ""


def as_list(sentences: Iterable[str]) -> list[str]:
    """A Markdown list and an empty line; nothing if there is none."""
    lines = [f"- {sentence}" for sentence in sentences]
    return [*lines, ""] if lines else []
