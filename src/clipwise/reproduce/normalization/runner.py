"""`clipwise reproduce normalization`: run what is missing of the tables, several runs at a time, and write a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clipwise.bench.environment import device_of, environment
from clipwise.bench.limits import Deadline
from clipwise.errors import ConfigurationError
from clipwise.files import replace_file
from clipwise.reproduce.normalization import plots, report
from clipwise.reproduce.normalization.results import best_of, key_of
from clipwise.reproduce.normalization.setting import Setting
from clipwise.reproduce.normalization.tables import FIGURE_1, QUICK, TABLES, Table, quick
from clipwise.reproduce.normalization.workers import Task, Workers
from clipwise.reproduce.store import Cell, Store

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        out: the folder of the results.
        tables: by name; all if neither tables nor figures are given.
        figures: "1".
        data: the folder of data sets.
        device: cpu or cuda.
        seeds: how many runs of each entry, in place of what a table has.
        quick: small networks on small data: shows that it works, not how well.
        workers: how many runs at a time, each in a process of its own.
        budget_seconds: stop after this time.
        retry: run again what failed.
    """

    out: Path
    tables: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    quick: bool = False
    workers: int = 1
    budget_seconds: float | None = None
    retry: bool = False

    @property
    def command(self) -> str:
        """Without the names of folders, which mean nothing elsewhere."""
        words = ["clipwise reproduce normalization", *(f"--table {name}" for name in self.tables)]
        words += [f"--figure {name}" for name in self.figures]
        words += ["--data DIR"] if self.data else []
        words += [f"--device {self.device}", f"--workers {self.workers}"]
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        return " ".join([*words, *(["--quick"] if self.quick else [])])


class Entry(NamedTuple):
    """One place in a table."""

    table: Table
    family: str
    method: str
    value: float

    @property
    def settings(self) -> list[Setting]:
        """What competes for it."""
        return self.table.tried(self.family, self.method, self.value)

    def __str__(self) -> str:
        return f"table {self.table.name}: {self.family}, {self.method}, {self.table.over} {self.value:g}"


def reproduce(options: Options, say: Say) -> Store:
    """Run what is missing and write results.json, results.md and, where matplotlib is, plots."""
    entries = list(_entries(options))
    device = device_of(options.device)
    deadline = Deadline(options.budget_seconds)
    store = Store(options.out)
    store.begin(options.command, environment(device))
    with Workers(options.workers, options.data, options.device, deadline) as workers:
        _run(entries, store, workers, options, deadline, say)
    text = report.markdown(store, options.quick)
    replace_file(options.out / "results.md", lambda file: file.write(text.encode()), mode=0o644)
    say(f"wrote {options.out / 'results.md'}")
    for file in plots.draw(store, options.out, options.quick):
        say(f"wrote {file}")
    return store


def needed(entry: Entry, store: Store, seeds: int, again: Set[str] = frozenset()) -> list[Task]:
    """What an entry still lacks: its trials; once these are there, its tested runs.

    It depends on the store alone, so that any command goes on where another stopped. What is in `again` counts as
    missing.
    """

    def missing(setting: Setting, judged_by: str, seed: int) -> bool:
        key = key_of(setting, judged_by, seed)
        return key not in store.cells or key in again

    tried = entry.settings
    if len(tried) > 1:
        trials = [Task(s, "validation", 0) for s in tried if missing(s, "validation", 0)]
        if trials:
            return trials
        best = best_of([store.cells[key_of(s, "validation", 0)] for s in tried])
        if best is None:
            return []  # every trial failed: that is the result
        tried = [tried[best]]
    return [Task(tried[0], "test", seed) for seed in range(seeds) if missing(tried[0], "test", seed)]


def _run(
    entries: list[Entry], store: Store, workers: Workers, options: Options, deadline: Deadline, say: Say
) -> None:
    """Until nothing is missing or the time is up. Results are written by this process alone."""
    running: dict[Future[Cell | None], tuple[Entry, Task]] = {}
    again = {key for key, cell in store.cells.items() if options.retry and "failed" in cell}
    is_over = False
    while True:
        if not is_over and deadline.left() > 0:
            asked = {key_of(*task) for _, task in running.values()}
            for entry, task in _next(entries, store, options.seeds, again):
                if len(running) >= options.workers:
                    break
                if key_of(*task) not in asked:
                    asked.add(key_of(*task))
                    running[workers.start(task)] = entry, task
        if not running:
            break
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            entry, task = running.pop(future)
            try:
                found = future.result()
            except BrokenProcessPool:
                say("a worker was ended from outside, perhaps for memory: go on with fewer --workers")
                return
            if found is None:
                is_over = True
                continue
            store.add(key_of(*task), _cell(task, found))
            again.discard(key_of(*task))
            say(f"{entry}, {task.judged_by}, seed {task.seed}: {report.in_short(found)}")
    if is_over or deadline.left() <= 0:
        say("the time is up: the same command goes on where it stopped")


def _next(
    entries: list[Entry], store: Store, seeds: int | None, again: Set[str]
) -> Iterator[tuple[Entry, Task]]:
    """Everything that could start now, the most important first."""
    for entry in entries:
        for task in needed(entry, store, entry.table.seeds if seeds is None else seeds, again):
            yield entry, task


def _cell(task: Task, found: Cell) -> Cell:
    told = {"setting": task.setting.key, "seed": task.seed, "judged_by": task.judged_by}
    return {**told, "epochs": task.setting.epochs, **found}


def _entries(options: Options) -> Iterator[Entry]:
    """The places of the tables that were asked for, in their order; a figure takes some columns of tables."""
    known = [table.name for table in TABLES]
    for name in options.tables:
        if name not in known:
            raise ConfigurationError(f"table={name!r} is not known: use one of {', '.join(sorted(known))}.")
    for name in options.figures:
        if name != "1":
            raise ConfigurationError(f"figure={name!r} is not known: the paper has figure 1 alone.")
    asked = options.tables
    if not asked and not options.figures:
        asked = QUICK if options.quick else tuple(known)
    for table in TABLES:
        is_asked = table.name in asked
        methods = table.methods if is_asked else [FIGURE_1[table.name]] if _is_drawn(table, options) else []
        made = quick(table) if options.quick else table
        for value in made.values:
            for family in made.families:
                for method in methods:
                    yield Entry(made, family, method, value)


def _is_drawn(table: Table, options: Options) -> bool:
    return "1" in options.figures and table.name in FIGURE_1
