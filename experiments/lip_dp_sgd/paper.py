"""The weight-clipping paper for `python -m experiments`: runs, training, and the page of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.harness.environment import device_of
from experiments.harness.limits import Deadline, reading_data
from experiments.harness.paper import Options, Paper, Task
from experiments.harness.store import Cell
from experiments.lip_dp_sgd import page, plots
from experiments.lip_dp_sgd.grid import FIGURES, asked
from experiments.lip_dp_sgd.jobs import Bench, work
from experiments.lip_dp_sgd.sets import records


def tasks(options: Options, found: Mapping[str, Cell]) -> Iterator[Task]:
    """Trials on validation parts; when all of a row are finished, the best of them on the test part."""
    for one in asked(options.figures, options.quick, found, options.seeds):
        yield one.task(options.quick)


def train(task: Task, options: Options, deadline: Deadline, unfinished: Path) -> Cell:
    """One run. It is short, so a stopped run starts again."""
    job: Any = task.setting
    device = device_of(options.device)
    with reading_data():
        records(job.data, options.data, device)
    # The search for the fastest convolution pays only if shapes repeat. Those of Poisson batches do not.
    torch.backends.cudnn.benchmark = False
    return work(job, Bench(options.data, device, deadline, unfinished), task.seed, task.judged_by)


PAPER = Paper(
    name="lip-dp-sgd",
    figures=FIGURES,
    tasks=tasks,
    train=train,
    page=page.markdown,
    plots=plots.plot_all,
    takes_epochs=False,  # epochs are part of the search
)
