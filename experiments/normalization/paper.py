"""The runs of the normalization paper: for each entry of the tables its trials, then its test runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from experiments.harness.paper import Options, Paper, Place, Task, of_table
from experiments.harness.store import Cell
from experiments.normalization import page, plots
from experiments.normalization.records import best_of
from experiments.normalization.tables import FIGURE_1, QUICK, TABLES, Table, quick
from experiments.normalization.training import train_task

_FIGURE = "1"


def tasks(options: Options, found: Mapping[str, Cell]) -> Iterator[Task]:
    """The runs of the selected tables that can start now."""
    for table in TABLES:
        methods = _methods(table, options)
        made = quick(table) if options.quick else table
        for value in made.values:
            for family in made.families:
                for method in methods:
                    yield from _entry(made, family, method, value, options, found)


def _entry(
    table: Table, family: str, method: str, value: float, options: Options, found: Mapping[str, Cell]
) -> Iterator[Task]:
    """Trials on the validation part; when all are finished, the best of them on the test part."""
    row = f"{family}, {method}, {table.over} {value:g}"
    tried = table.tried(family, method, value)
    places = [Place(of_table(table.name), row, s.epochs, options.quick, value) for s in tried]
    best: int | None = 0
    if len(tried) > 1:
        trials = [Task(s, 0, "validation", place) for s, place in zip(tried, places, strict=True)]
        yield from trials
        cells = [found[task.key] for task in trials if task.key in found]
        best = best_of(cells) if len(cells) == len(trials) else None
    if best is not None:
        for seed in range(options.seeds or table.seeds):
            yield Task(tried[best], seed, "test", places[best])


def _methods(table: Table, options: Options) -> Iterable[str]:
    """All methods of a selected table; for figure 1, its columns."""
    if not options.figures:
        return table.methods if not options.quick or table.name in QUICK else ()
    if of_table(table.name) in options.figures:
        return table.methods
    return [FIGURE_1[table.name]] if _FIGURE in options.figures and table.name in FIGURE_1 else ()


PAPER = Paper(
    name="normalization",
    figures=(*(of_table(table.name) for table in TABLES), _FIGURE),
    tasks=tasks,
    train=train_task,
    page=page.markdown,
    plots=plots.plot_all,
    takes_epochs=False,  # epochs are part of the search
)
