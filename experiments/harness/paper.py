"""A paper for `python -m experiments`: its runs, how a run is trained, and the page of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.harness.limits import Deadline
from experiments.harness.store import Cell, Store

_TABLE = "table-"


def of_table(name: str) -> str:
    """The name of a table in the list of figures."""
    return f"{_TABLE}{name}"


def asked_for(figures: Iterable[str], tables: Iterable[str]) -> tuple[str, ...]:
    """Figures and tables, by their names in the list of figures."""
    return (*figures, *map(of_table, tables))


def argument(figure: str) -> tuple[str, str]:
    """The option and value of a figure: ("table", "5") for `table-5`, ("figure", "1") for `1`."""
    return ("table", figure.removeprefix(_TABLE)) if figure.startswith(_TABLE) else ("figure", figure)


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        paper: its name.
        out: the folder of the results.
        figures: figures, and tables as `table-NAME`; all if empty.
        data: the folder of data sets.
        seeds: the number of runs per row, instead of that of the figure or table.
        epochs: the maximum number of epochs, instead of that of the row.
        quick: run few rows on the digits that ship with clipwise, as a check.
        budget_seconds: stop after this time; unfinished runs continue later.
        workers: the number of runs at a time, each in its own process.
        retry: run failed runs again.
        take: other folders of results to copy runs from.
        only: run only rows with this text in their names, so that machines can share a grid.
    """

    paper: str
    out: Path
    figures: tuple[str, ...] = ()
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    epochs: int | None = None
    quick: bool = False
    budget_seconds: float | None = None
    workers: int = 1
    retry: bool = False
    take: tuple[Path, ...] = ()
    only: str = ""

    @property
    def command(self) -> str:
        """The command, without the names of folders."""
        words = [f"python -m experiments {self.paper}", *map(_as_option, self.figures)]
        words += ["--data DIR"] if self.data else []
        words += [f"--device {self.device}"]
        words += [f"--only '{self.only}'"] if self.only else []
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        words += [f"--epochs {self.epochs}"] if self.epochs else []
        words += [f"--workers {self.workers}"] if self.workers > 1 else []
        return " ".join([*words, *(["--quick"] if self.quick else [])])

    def asks_for(self, figure: str) -> bool:
        """Whether a figure is selected."""
        return not self.figures or figure in self.figures


@dataclass(frozen=True)
class Place:
    """A place in the results. A run may have several places."""

    figure: str
    row: str
    epochs_asked: int
    quick: bool = False
    budget: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, without missing values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _as_option(figure: str) -> str:
    kind, name = argument(figure)
    return f"--{kind} {name}"


class AnySetting(Protocol):
    """The common part of all settings."""

    @property
    def key(self) -> str:
        """A unique name."""

    @property
    def epochs(self) -> int:
        """The number of epochs of a run."""


def key_of(setting: AnySetting, judged_by: str, seed: int) -> str:
    """The key of a run in the store."""
    return f"{judged_by} {setting.key} seed={seed}"


@dataclass(frozen=True)
class Task:
    """One run: a setting, a seed, its evaluation part ("test" or "validation"), and its place in the results."""

    setting: AnySetting
    seed: int
    judged_by: str
    place: Place

    @property
    def key(self) -> str:
        """The key of the run. Equal runs of several figures share it."""
        return key_of(self.setting, self.judged_by, self.seed)


# From a task, the options, the deadline and a checkpoint path of an unfinished run to a result.
Train = Callable[[Task, Options, Deadline, Path], Cell]


@dataclass(frozen=True)
class Paper:
    """A paper's experiments.

    Attributes:
        name: its name on the command line.
        figures: the names of figures, in the order of the runs; tables as `table-NAME`.
        tasks: the runs that can start now, in order of importance, from the options and the finished runs by key.
            Called again whenever a run ends, because some runs depend on results.
        train: trains one run. A function at module level, so that other processes can import it.
        page: the results as Markdown. The flag is whether it is the page of quick runs.
        plots: writes plots into a folder, and returns the files.
        takes_epochs: whether `--epochs` may shorten runs.
    """

    name: str
    figures: tuple[str, ...]
    tasks: Callable[[Options, Mapping[str, Cell]], Iterator[Task]]
    train: Train
    page: Callable[[Store, bool], str]
    plots: Callable[[Store, bool, Path], list[Path]]
    takes_epochs: bool = True
