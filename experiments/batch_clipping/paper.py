"""The runs of the batch-clipping paper: its figures, then the table at equal epsilon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from experiments.batch_clipping import page, plots, tuned
from experiments.batch_clipping.figures import FIGURES
from experiments.batch_clipping.setting import Setting
from experiments.batch_clipping.training import train_task
from experiments.harness.paper import Options, Paper, Place, Task
from experiments.harness.store import Cell

QUICK_FIGURES, QUICK_ROWS, QUICK_TRIALS = ("4", "18", "B"), 5, 2
QUICK_METHODS = ("IC, flat, group norm", "BC, flat, batch norm", "BC, multipliers (optimal), batch norm")


def tasks(options: Options, found: Mapping[str, Cell]) -> Iterator[Task]:
    """Every row and seed of the selected figures, then the trials and tests at equal epsilon."""
    for figure in FIGURES:
        if options.asks_for(figure.name) and (options.figures or not options.quick or figure.name in QUICK_FIGURES):
            for row in figure.rows[: QUICK_ROWS if options.quick else None]:
                for seed in range(options.seeds or 1):
                    yield _task(options, row.setting, seed, "test", figure.name, row.label)
    if options.asks_for(tuned.NAME):
        for epsilon in tuned.EPSILONS[-1:] if options.quick else tuned.EPSILONS:
            for method in QUICK_METHODS if options.quick else tuned.METHODS:
                yield from _tuned(options, found, method, epsilon)


def _tuned(options: Options, found: Mapping[str, Cell], method: str, epsilon: float) -> Iterator[Task]:
    """Trials of one method on the validation part; when all are finished, the best of them on the test part."""
    settings = tuned.trials(method, epsilon)[: QUICK_TRIALS if options.quick else None]
    trials = [_task(options, s, 0, "validation", tuned.NAME, method, epsilon) for s in settings]
    yield from trials
    cells = [found.get(task.key, {"unfinished": True}) for task in trials]
    if any("unfinished" in cell for cell in cells):
        return
    best = tuned.chosen(cells)
    for setting, trial in zip(settings, trials, strict=True):
        if trial.setting.key == best:
            for seed in range(1 if options.quick else tuned.SEEDS):
                yield _task(options, setting, seed, "test", tuned.NAME, method, epsilon)


def _task(
    options: Options, setting: Setting, seed: int, judged_by: str, figure: str, row: str, budget: float | None = None
) -> Task:
    place = Place(figure, row, setting.epochs, options.quick, budget)
    return Task(_shortened(setting, options), seed, judged_by, place)


def _shortened(setting: Setting, options: Options) -> Setting:
    if options.epochs is not None:
        setting = setting.but(epochs=min(setting.epochs, options.epochs))
    if not options.quick:
        return setting
    model = "bn_lenet5" if setting.model == "resnet18" else setting.model
    return setting.but(data="digits", model=model, epochs=1, batch_size=min(setting.batch_size, 128))


PAPER = Paper(
    name="batch-clipping",
    figures=(*(figure.name for figure in FIGURES), tuned.NAME),
    tasks=tasks,
    train=train_task,
    page=page.markdown,
    plots=plots.plot_all,
)
