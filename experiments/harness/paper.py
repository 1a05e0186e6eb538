"""What a paper is to `python -m experiments`: which runs it asks for, how one is trained, and the page of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.harness.limits import Deadline
from experiments.harness.store import Cell, Store

_TABLE = "table-"


def of_table(name: str) -> str:
    """The name among figures of a table."""
    return f"{_TABLE}{name}"


def asked_for(figures: Iterable[str], tables: Iterable[str]) -> tuple[str, ...]:
    """Figures and tables, under their names among figures."""
    return (*figures, *map(of_table, tables))


def argument(figure: str) -> tuple[str, str]:
    """How the command is told of it: ("table", "5") for `table-5`, ("figure", "1") for `1`."""
    return ("table", figure.removeprefix(_TABLE)) if figure.startswith(_TABLE) else ("figure", figure)


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        paper: by its name.
        out: the folder of the results.
        figures: figures, and tables as `table-NAME`; all if empty.
        data: the folder of data sets.
        seeds: how many runs of each row, in place of what a figure or table has.
        epochs: at most so many, in place of what a row has.
        quick: few rows, on the digits that ship with clipwise: shows that it works, not how well.
        budget_seconds: stop after this time; what is not finished goes on later.
        workers: how many runs at a time, each in a process of its own.
        retry: run again what failed.
        take: other folders of results, whose runs are taken over.
        only: a text: rows whose name does not have it are left out, so that machines can share a grid.
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
        """Without the names of folders, which mean nothing elsewhere."""
        words = [f"python -m experiments {self.paper}", *map(_as_option, self.figures)]
        words += ["--data DIR"] if self.data else []
        words += [f"--device {self.device}"]
        words += [f"--only '{self.only}'"] if self.only else []
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        words += [f"--epochs {self.epochs}"] if self.epochs else []
        words += [f"--workers {self.workers}"] if self.workers > 1 else []
        return " ".join([*words, *(["--quick"] if self.quick else [])])

    def asks_for(self, figure: str) -> bool:
        """Whether a figure is wanted."""
        return not self.figures or figure in self.figures


@dataclass(frozen=True)
class Place:
    """Where a run is shown: one run may be in several places."""

    figure: str
    row: str
    epochs_asked: int
    quick: bool = False
    budget: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, without what is not there."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _as_option(figure: str) -> str:
    kind, name = argument(figure)
    return f"--{kind} {name}"


class AnySetting(Protocol):
    """What a paper's settings have, whatever else they say."""

    @property
    def key(self) -> str:
        """A name that no other setting has."""

    @property
    def epochs(self) -> int:
        """How long a run is."""


def key_of(setting: AnySetting, judged_by: str, seed: int) -> str:
    """Under which a run lies in the store."""
    return f"{judged_by} {setting.key} seed={seed}"


@dataclass(frozen=True)
class Task:
    """One run: a setting and a seed, what it is judged by ("test" or "validation"), and where it is shown."""

    setting: AnySetting
    seed: int
    judged_by: str
    place: Place

    @property
    def key(self) -> str:
        """Rows of several figures that are the same run share it."""
        return key_of(self.setting, self.judged_by, self.seed)


# From a task, the options, the time that is left and a place for what is unfinished to a result.
Train = Callable[[Task, Options, Deadline, Path], Cell]


@dataclass(frozen=True)
class Paper:
    """A paper's experiments.

    Attributes:
        name: as the command calls it.
        figures: the names of what can be asked for, in the order in which it is run; tables as `table-NAME`.
        tasks: the runs that can begin now, in the order of their importance, from the options and the finished runs by
            key. It is asked again whenever a run ends: what is chosen by results appears when these are there.
        train: one run. It lies at the top of a module, so that other processes can find it.
        page: the results as Markdown. The flag is whether it is the page of quick runs.
        plots: writes pictures into a folder, and returns the files.
        takes_epochs: whether runs may be cut to fewer epochs.
    """

    name: str
    figures: tuple[str, ...]
    tasks: Callable[[Options, Mapping[str, Cell]], Iterator[Task]]
    train: Train
    page: Callable[[Store, bool], str]
    plots: Callable[[Store, bool, Path], list[Path]]
    takes_epochs: bool = True
