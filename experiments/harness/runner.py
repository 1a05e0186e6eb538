"""`python -m experiments PAPER`: run the missing runs of a paper in order, and write its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import replace_file
from experiments.harness import report
from experiments.harness.environment import at_its_best, device_of, environment
from experiments.harness.limits import Deadline
from experiments.harness.paper import Options, Paper, Task, argument
from experiments.harness.store import Cell, Store
from experiments.harness.workers import Workers, WorkersLostError
from experiments.index import paper_of

__all__ = ["Options", "reproduce"]

Say = Callable[[str], None]


def reproduce(options: Options, say: Say) -> Store:
    """Run the missing runs; write results.json, results.md and, if matplotlib is installed, plots."""
    paper = paper_of(options.paper)
    _require_known(paper, options)
    store = Store(options.out)
    device = device_of(options.device)
    with at_its_best(device):
        store.begin(options.command, environment(device))
    for folder in options.take:
        store.take(Store(folder))
    _require_rows(paper, options, store)
    try:
        _run(paper, options, store, say)
    except BaseException:
        if store.cells:  # no page without runs, for example if data is missing
            _write_page(paper, options, store, say)
        raise
    _write_page(paper, options, store, say)
    for file in paper.plots(store, options.quick, options.out):
        say(f"wrote {file}")
    return store


def _write_page(paper: Paper, options: Options, store: Store, say: Say) -> None:
    text = paper.page(store, options.quick)
    replace_file(options.out / "results.md", lambda file: file.write(text.encode()), mode=0o644)
    say(f"wrote {options.out / 'results.md'}")


def _require_known(paper: Paper, options: Options) -> None:
    for name in options.figures:
        if name not in paper.figures:
            kind, asked = argument(name)
            of_kind = [known for other, known in map(argument, paper.figures) if other == kind]
            use = f"use one of {', '.join(of_kind)}" if of_kind else f"{paper.name} has no {kind}s"
            raise ConfigurationError(f"{kind}={asked!r} is not known: {use}.")
    if options.seeds is not None and options.seeds < 1:
        raise ConfigurationError(f"seeds={options.seeds} is not possible: give 1 or more, or leave it out.")
    if options.epochs is not None and not paper.takes_epochs:
        raise ConfigurationError(
            f"--epochs is not possible with {paper.name}, because runs with other numbers of epochs do not compare: "
            "leave it out. To shorten the command, use --budget-seconds or --quick."
        )


def _require_rows(paper: Paper, options: Options, store: Store) -> None:
    """Raise if no row has the text of `--only` in its name."""
    rows = [task.place.row for task in paper.tasks(options, store.cells)]
    if not any(options.only in row for row in rows):
        raise ConfigurationError(f"only={options.only!r} is in no row's name: give a part of one, such as {rows[0]!r}.")


def _run(paper: Paper, options: Options, store: Store, say: Say) -> None:
    """Run until nothing is missing or the time is up."""
    deadline = Deadline(options.budget_seconds)
    grid = _Grid(paper, options, store)
    running: dict[Future[Cell], Task] = {}
    with Workers(options, deadline) as workers:
        while True:
            while len(running) < options.workers and deadline.left() > 0:
                task = grid.next({task.key for task in running.values()})
                if task is None:
                    break
                running[workers.begin(task)] = task
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    cell = future.result()
                except WorkersLostError as lost:
                    say(str(lost))
                    return
                grid.finished(task, cell)
                where = f"{task.place.figure}: {task.place.row}"
                say(f"{where}, {task.judged_by}, seed {task.seed}: {report.in_short(cell)}")
    if not grid.is_complete:
        say("the time is up: the same command continues where it stopped")


class _Grid:
    """The runs of a paper and their results."""

    def __init__(self, paper: Paper, options: Options, store: Store) -> None:
        self._paper, self._options, self._store = paper, options, store
        self._tried: set[str] = set()

    def next(self, running: set[str]) -> Task | None:
        """The next run that is missing and not running. Adds the places of finished runs to the store."""
        for task in self._tasks():
            if task.key in running:
                continue
            if self._is_missing(task.key):
                return task
            if task.key in self._store.cells:
                self._store.show(task.key, task.place.to_dict())
        return None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to run."""
        return all("unfinished" not in self._store.cells.get(task.key, {"unfinished": True}) for task in self._tasks())

    def finished(self, task: Task, cell: Cell) -> None:
        """Store the result of a run."""
        self._tried.add(task.key)
        if "unfinished" in cell and not cell.get("public_accuracy_by_epoch"):
            return  # it has no result yet
        setting = task.setting
        result = {"setting": setting.key, "seed": task.seed, "judged_by": task.judged_by, "epochs": setting.epochs}
        self._store.add(task.key, result | cell)
        self._store.show(task.key, task.place.to_dict())

    def _tasks(self) -> Iterator[Task]:
        tasks = self._paper.tasks(self._options, self._store.cells)
        return (task for task in tasks if self._options.only in task.place.row)

    def _is_missing(self, key: str) -> bool:
        """Whether to run it: an unfinished run continues once per command; a failed one runs again with `--retry`."""
        cell = self._store.cells.get(key)
        again = cell is None or "unfinished" in cell or (self._options.retry and "failed" in cell)
        return again and key not in self._tried
