"""Experiment logs and progress bars that show public values of a private run only.

A log is an output. Losses, gradient norms and batch sizes of training batches are private, and their values in a log
are not covered by the guarantee of the run. The classes here write the number of steps, epsilon, the learning rates and
what you pass as public.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from clipwise.engine.private import Private
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import one_of, whole

_CHEAP_SECONDS = 0.05  # for a figure by the tight accountant after every logged step
_REFRESH_SECONDS = 2.0  # between two figures of epsilon in a progress bar


class Sink(Protocol):
    """Where values go. A run of Weights & Biases is one, as is every object with this method."""

    def log(self, data: dict[str, float], *, step: int) -> object: ...


class RunLogger:
    """Writes the public values of a run to sinks, at every `every`-th step.

        with RunLogger(private, CSVLog("run/log.csv")) as log:
            for x, y in private.loader:
                private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
                log.step()

    Each entry has `epsilon` and `learning_rate`. Where the tight accountant is slow, epsilon is a looser bound by Renyi
    divergences, and its name is `epsilon_rdp`. It is never above the budget, which the run cannot exceed.

    Args:
        private: the run.
        sinks: `CSVLog`, `JSONLog`, `TensorBoardLog`, a run of Weights & Biases, or any object with
            `log(values, step=number)`.
        every: the number of steps between two entries.
        public: computes further values from public data alone, such as the loss on public rows, for each entry.
    """

    def __init__(
        self, private: Private, *sinks: Sink, every: int = 1, public: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        for sink in sinks:
            if not callable(getattr(sink, "log", None)):
                raise ConfigurationError(f"{sink!r} is no sink, which has a method log: give CSVLog(path) or the like.")
        self._private, self._sinks, self._public = private, sinks, public
        self._every = whole("every", every, least=1)
        self._logged = private.steps
        self._spent = SpentSoFar(private)

    def step(self) -> None:
        """Write an entry if `every` steps were taken since the last one. Call it after each `private.step`."""
        if self._private.steps - self._logged >= self._every:
            self.log({} if self._public is None else self._public())

    def log(self, public: Mapping[str, float]) -> None:
        """Write an entry now, with further values that are public."""
        self._logged = self._private.steps
        entry = self._spent() | _learning_rates(self._private)
        entry |= {name: _public_number(name, value) for name, value in public.items()}
        for sink in self._sinks:
            sink.log(entry, step=self._logged)

    def close(self) -> None:
        """Close the sinks that have a `close` method."""
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SpentSoFar:
    """Epsilon of a run as an entry of a log: `epsilon`, or `epsilon_rdp` where the tight accountant is slow."""

    def __init__(self, private: Private) -> None:
        self._private, self._is_cheap = private, True

    def __call__(self) -> dict[str, float]:
        if self._is_cheap:
            began = time.thread_time()  # of this thread: other processes do not count
            found = self._private.spent()
            self._is_cheap = time.thread_time() - began < _CHEAP_SECONDS
            return {"epsilon": found.epsilon}
        loose = self._private.spent(accountant="rdp").epsilon
        budget = self._private.budget
        return {"epsilon_rdp": loose if budget is None else min(loose, budget)}


class CSVLog:
    """Appends entries to a CSV file. A value with a new name, such as `epsilon_rdp`, adds a column."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._columns = self._read()[0]

    def log(self, data: dict[str, float], *, step: int) -> None:
        entry = {"step": step, **data}
        if new := [name for name in entry if name not in self._columns]:
            earlier = self._read()[1]
            self._columns += new
            with self._path.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(earlier)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(entry)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """The columns and the rows of the file."""
        if not self._path.exists():
            return [], []
        with self._path.open(newline="") as file:
            rows = csv.DictReader(file)
            return list(rows.fieldnames or ()), list(rows)


class JSONLog:
    """Appends one JSON object per entry to a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def log(self, data: dict[str, float], *, step: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **data}) + "\n")


class TensorBoardLog:
    """Writes entries as scalars for TensorBoard, to a folder. It needs clipwise-dp[logging]."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, data: dict[str, float], *, step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


def progress(private: Private, epochs: int = 1, *, bar: str = "rich") -> Iterator[Any]:
    """The items of `private.loader` for a number of epochs, with a progress bar that shows epsilon.

    Args:
        private: the run.
        epochs: the number of passes over `private.loader`.
        bar: "rich" or "tqdm", which needs clipwise-dp[logging].
    """
    one_of("bar", bar, ("rich", "tqdm"))
    items = (item for _ in range(epochs) for item in private.loader)
    return (_rich if bar == "rich" else _tqdm)(private, items, epochs * len(private.loader))


def _rich(private: Private, items: Iterator[Any], total: int) -> Iterator[Any]:
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("training", total=total)
        shown = _Shown(private)
        for item in items:
            yield item
            bar.update(task, advance=1, description=shown.text())
        bar.update(task, description=shown.text(now=True))


def _tqdm(private: Private, items: Iterator[Any], total: int) -> Iterator[Any]:
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="training") as bar:
        shown = _Shown(private)
        for item in items:
            yield item
            bar.update(1)
            bar.set_description(shown.text())
        bar.set_description(shown.text(now=True))


class _Shown:
    """The text of a progress bar, computed every few seconds."""

    def __init__(self, private: Private) -> None:
        self._private, self._due, self._text = private, 0.0, "training"

    def text(self, now: bool = False) -> str:
        if now or time.monotonic() >= self._due:
            self._text = f"epsilon {self._private.spent().epsilon:.3g}"
            self._due = time.monotonic() + _REFRESH_SECONDS
        return self._text


def _learning_rates(private: Private) -> dict[str, float]:
    rates = [float(group["lr"]) for group in private.optimizer.param_groups if "lr" in group]
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate_{i}": rate for i, rate in enumerate(rates)}


def _public_number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.requires_grad:
        raise ConfigurationError(
            f"{name!r} has a gradient history, as the loss of a training batch has, which is private: log values of "
            "public rows, computed under torch.no_grad()."
        )
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name!r} must be a number, not {type(value).__name__}.") from None
