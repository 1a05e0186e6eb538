"""The output of a training run: a live display on a terminal, plain lines otherwise, or JSON lines for programs.

Everything that it shows is public or released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from clipwise.cli.output import is_live, remark, rounded_up, say, stdout
from clipwise.recipes.finish import rounded
from clipwise.recipes.train import Moment

# Without a terminal, a line is printed at most this often, in seconds.
_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Shows the course of a run.

    Args:
        budget: the epsilon of the run; None without privacy.
        as_json: print one JSON object per line.
        quiet: print nothing but errors and the end.
    """

    def __init__(self, budget: float | None, *, as_json: bool = False, quiet: bool = False) -> None:
        self._budget, self._as_json, self._quiet = budget, as_json, quiet
        self._console = stdout()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._latest_line = time.monotonic()

    def __enter__(self) -> Display:
        if is_live(self._console) and not (self._as_json or self._quiet):
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def line(self, text: str, **event: Any) -> None:
        """A line of text, or the event as JSON."""
        if self._as_json:
            say(json.dumps(event, allow_nan=False, ensure_ascii=False), console=self._console)
        elif not self._quiet:
            say(text, console=self._console)

    def watch(self, moment: Moment) -> None:
        """Progress after a step."""
        is_last = moment.step == moment.steps
        if self._progress is not None:
            if self._task is None:
                self._task = self._progress.add_task("training", total=moment.steps, figures="")
            self._progress.update(self._task, completed=moment.step, figures=self._figures(moment))
        elif is_last or time.monotonic() - self._latest_line > _SECONDS_BETWEEN_LINES:
            self._latest_line = time.monotonic()
            values = {"step": moment.step, "steps": moment.steps, "epoch": round(moment.epoch, 3)}
            text = f"step {moment.step} of {moment.steps}, {self._figures(moment)}"
            text += "" if is_last or moment.left is None else f", {duration(moment.left)} left"
            self.line(text, kind="progress", **values, epsilon=moment.epsilon, seconds=moment.seconds)

    def released(self, figure: Mapping[str, Any]) -> None:
        """A released figure."""
        self.line(rounded(figure), kind="released", **figure)

    def warn(self, text: str) -> None:
        """A line on stderr."""
        remark(text, "yellow")

    def _figures(self, moment: Moment) -> str:
        text = f"epoch {moment.epoch:.1f} of {moment.epochs:g}"
        if self._budget is None:
            return text
        if moment.epsilon is None:  # not computed yet
            return f"{text}, budget epsilon {self._budget:g}"
        return f"{text}, epsilon {rounded_up(moment.epsilon, 3)} of {self._budget:g}"


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
