"""Backpropagation clipping for `python -m experiments`: runs, training, and the page of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.backprop_clipping import page, plots, signal, training, withdrawn
from experiments.backprop_clipping.grid import FIGURES, asked
from experiments.backprop_clipping.sets import images
from experiments.harness.environment import device_of
from experiments.harness.limits import Deadline, reading_data
from experiments.harness.paper import Options, Paper, Task
from experiments.harness.store import Cell


def tasks(options: Options, found: Mapping[str, Cell]) -> Iterator[Task]:
    """Trials on validation parts; when all of a row are finished, the best of them on the test part."""
    for one in asked(options.figures, options.quick, options.seeds or 1, found):
        yield one.task(options.quick)


def train(task: Task, options: Options, deadline: Deadline, unfinished: Path) -> Cell:
    """One run. It is short, so a stopped run starts again."""
    job: Any = task.setting
    with reading_data():
        at_hand = images(job.data, options.data, device_of(options.device), task.judged_by)
    if isinstance(job, withdrawn.Withdrawn):
        return withdrawn.run(job, at_hand, task.seed, deadline)
    if isinstance(job, signal.Signal):
        return signal.run(job, at_hand, task.seed, deadline, unfinished)
    return training.run(job, at_hand, task.seed, deadline, unfinished)


PAPER = Paper(
    name="backprop-clipping",
    figures=FIGURES,
    tasks=tasks,
    train=train,
    page=page.markdown,
    plots=plots.plot_all,
    takes_epochs=False,  # epochs are part of the search
)
