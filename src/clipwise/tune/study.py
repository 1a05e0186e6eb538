"""A search for high accuracy and small epsilon, with Optuna. It is saved in a file and can be continued."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clipwise.errors import ClipwiseError, ConfigurationError
from clipwise.ledger.durable_files import replace_file
from clipwise.privacy import rounded_up
from clipwise.report.plots import picture
from clipwise.tune.selection import composed_epsilon
from clipwise.tune.subject import Choice, Point, Space, Subject, described, front, plain

FILE = "study.db"
SPACE = "space"  # the attribute of a study that describes its space
Say = Callable[[str], None]


def search(subject: Subject, trials: int, out: Path, say: Say, *, seed: int = 0) -> list[Point]:
    """Run until the study has `trials` finished trials; returns all of them, including earlier ones.

    `say` is called with one line per run. The runs do not use `seed`.
    """
    if trials < 1:
        raise ConfigurationError(f"trials={trials} is not possible: give 1 or more.")
    study = _study(subject, out, seed)
    while (missing := trials - len(_finished(study))) > 0:
        before = len(study.trials)
        study.optimize(lambda trial: _objective(trial, subject, say), n_trials=missing, catch=(ClipwiseError,))
        failed = [t for t in study.trials[before:] if t.state.name == "FAIL"]
        if len(failed) == missing:
            raise ConfigurationError(
                f"Every run of {subject.name} failed; the last error was: {failed[-1].user_attrs.get('reason', '')}"
            )
    return [_point(t) for t in _finished(study)]


def _objective(trial: Any, subject: Subject, say: Say) -> tuple[float, float]:
    try:
        settings = suggested(trial, subject.space)
        score = subject.score(settings)
    except ClipwiseError as error:
        trial.set_user_attr("reason", str(error))
        say(f"trial {trial.number}: {error}")
        raise
    trial.set_user_attr("delta", score.delta)
    trial.set_user_attr("release", score.release)
    say(f"trial {trial.number}: accuracy {score.accuracy:.2%}, epsilon {rounded_up(score.epsilon)}")
    return score.accuracy, score.epsilon


def suggested(trial: Any, space: Space) -> dict[str, Any]:
    """A point of the space, drawn by the sampler of a trial."""
    found: dict[str, Any] = {}
    for name, d in space.items():
        if isinstance(d, Choice):
            # By index: a list may hold values that the file cannot store.
            found[name] = d.values[trial.suggest_categorical(name, list(range(len(d.values))))]
        elif d.whole:
            found[name] = trial.suggest_int(name, math.ceil(d.low), math.floor(d.high), log=d.log)
        else:
            found[name] = trial.suggest_float(name, d.low, d.high, log=d.log)
    trial.set_user_attr("settings", {name: plain(value) for name, value in found.items()})
    return found


def _finished(study: Any) -> list[Any]:
    return [t for t in study.trials if t.state.name == "COMPLETE"]


def _point(trial: Any) -> Point:
    kept, release = trial.user_attrs, trial.user_attrs.get("release")
    release = None if release is None else tuple(release)
    accuracy, epsilon = trial.values
    return Point(accuracy, epsilon, kept.get("delta"), release, trial.number, dict(kept["settings"]))


def _study(subject: Subject, out: Path, seed: int) -> Any:
    """Create or open the study of this name in a folder; refuse one with another space."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigurationError(
            "`clipwise tune` needs Optuna, which is not installed: run `pip install 'clipwise-dp[tune]'`."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the reason of a failed trial is reported in one line
    out.mkdir(parents=True, exist_ok=True)
    now = described(subject.space)
    storage = f"sqlite:///{out / FILE}"
    study = _opened(optuna, subject.name, storage)
    before = study.user_attrs.get(SPACE, {} if study.trials else now)
    if before != now and all(t.state.name == "FAIL" for t in study.trials):
        # After a fixed mistake in a script, for example: there is no finished run to mix with others.
        optuna.delete_study(study_name=subject.name, storage=storage)
        study = _opened(optuna, subject.name, storage)
    elif before != now:
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        raise ConfigurationError(
            f"SPACE has changed since this study began, at {', '.join(map(repr, changed))}. Give another folder with "
            "--out."
        )
    if not study.trials:
        study.set_user_attr(SPACE, now)
    # A continued study must not draw its first points again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    return study


def _opened(optuna: Any, name: str, storage: str) -> Any:
    try:
        return optuna.create_study(
            study_name=name, storage=storage, directions=["maximize", "minimize"], load_if_exists=True
        )
    except Exception as error:  # an error of Optuna, SQLAlchemy or SQLite
        raise ConfigurationError(
            f"{storage.removeprefix('sqlite:///')} cannot be opened as a study ({type(error).__name__}): give another "
            "folder with --out."
        ) from error


RESULTS = "results.json"


def write(name: str, points: Sequence[Point], out: Path) -> list[Path]:
    """Write results.json, front.md and, if matplotlib is installed, front.svg to a subfolder of the study."""
    out = out / re.sub(r"[^\w-]", "-", name)
    trials = [{key: getattr(p, key) for key in ("number", "accuracy", "epsilon", "settings")} for p in points]
    stored = {"study": name, "trials": trials, "front": [p.number for p in front(points)]}
    results, page = json.dumps(stored, indent=1) + "\n", markdown(name, points)
    files = [out / RESULTS, out / "front.md"]
    replace_file(files[0], lambda file: file.write(results.encode()), mode=0o644)
    replace_file(files[1], lambda file: file.write(page.encode()), mode=0o644)
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return files
    return [*files, _plot(name, points, out / "front.svg")]


def markdown(name: str, points: Sequence[Point]) -> str:
    """The front as a table, and the cost of the search."""
    head, *rows = table(points)
    lines = [f"# {name}: accuracy against epsilon", "", f"{len(points)} runs; those on the Pareto front:", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", *cost_in_words(points)]) + "\n"


def table(points: Sequence[Point]) -> list[list[str]]:
    """The head and the rows of a table of the front."""
    best = front(points)
    names = list(best[0].settings) if best else []
    rows = []
    for p in best:
        settings = [p.settings.get(n) for n in names]
        shown = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in settings]
        rows.append([rounded_up(p.epsilon), f"{p.accuracy:.2%}", *shown])
    return [["epsilon", "accuracy", *names], *rows]


def cost_in_words(points: Sequence[Point]) -> list[str]:
    """The cost of the search in sentences."""
    lines = [
        "Epsilon is that of one run. The scores are accuracies on held-out records, without noise, and the search "
        "depends on them. On public data that costs nothing. On private records this choice has no guarantee: tune on "
        "public data, or use `clipwise tune --accounted`."
    ]
    runs, cost = len(points), composed_epsilon(points)
    if cost is not None:
        epsilon, delta = cost
        lines.append(
            f"If the settings of all {runs} runs had been fixed in advance, releasing all {runs} models would cost "
            f"epsilon {rounded_up(epsilon)} at delta {delta:.3g}."
        )
    return lines


def _plot(name: str, points: Sequence[Point], file: Path) -> Path:
    with picture(file, name, (5.2, 3.8)) as (axes,):
        axes.plot([p.epsilon for p in points], [p.accuracy for p in points], "o", color="0.7", markersize=4)
        best = front(points)
        line = {"where": "post", "color": "black", "markersize": 4, "label": "Pareto front"}
        axes.step([p.epsilon for p in best], [p.accuracy for p in best], "o-", **line)
        axes.set_xscale("log")
        axes.set_xlabel("epsilon of one run")
        axes.set_ylabel("validation accuracy")
        axes.legend(frameon=False)
    return file
