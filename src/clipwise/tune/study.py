"""A search for accuracy and for a small epsilon at once, with Optuna. It is kept in a file and can go on."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipwise.errors import ClipwiseError, ConfigurationError
from clipwise.privacy import rounded_up
from clipwise.tune.front import Point
from clipwise.tune.space import Choice, Dimension, Space
from clipwise.tune.subject import Score, Subject

FILE = "study.db"
Say = Callable[[str], None]


def search(subject: Subject, trials: int, out: Path, say: Say, *, seed: int = 0) -> list[tuple[Point, Score]]:
    """Run until the study has so many finished trials; returns all of them, of earlier commands too.

    Args:
        subject: what is tuned.
        trials: how many finished trials the study shall have.
        out: the folder of its file.
        say: told of each run.
        seed: of the search. What runs draw does not come from it.
    """
    if trials < 1:
        raise ConfigurationError(f"trials={trials} is not possible: give 1 or more.")
    study = _study(subject, out, seed)
    while (missing := trials - len(_finished(study))) > 0:
        before = len(study.trials)
        study.optimize(
            lambda trial: _objective(trial, subject, say), n_trials=missing, catch=(ClipwiseError,)
        )
        failed = [t for t in study.trials[before:] if t.state.name == "FAIL"]
        if len(failed) == missing:
            raise ConfigurationError(
                f"Every run of {subject.name} failed; the last one said: {failed[-1].user_attrs.get('reason', '')}"
            )
    return [(_point(t), _score(t)) for t in _finished(study)]


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
    """A point of the space, as the sampler of a trial draws it."""
    found: dict[str, Any] = {}
    for name, d in space.items():
        try:
            found[name] = _drawn(trial, name, d)
        except ValueError as error:
            raise ConfigurationError(
                f"SPACE[{name!r}] is not what it was when this study began: give another folder with --out."
            ) from error
    trial.set_user_attr("settings", {name: _plain(value) for name, value in found.items()})
    return found


def _drawn(trial: Any, name: str, d: Dimension) -> Any:
    if isinstance(d, Choice):
        # By its place: a list may hold what the file cannot.
        return d.values[trial.suggest_categorical(name, list(range(len(d.values))))]
    if d.whole:
        return trial.suggest_int(name, math.ceil(d.low), math.floor(d.high), log=d.log)
    return trial.suggest_float(name, d.low, d.high, log=d.log)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else str(value)


def _finished(study: Any) -> list[Any]:
    return [t for t in study.trials if t.state.name == "COMPLETE"]


def _point(trial: Any) -> Point:
    accuracy, epsilon = trial.values
    return Point(trial.number, accuracy, epsilon, dict(trial.user_attrs["settings"]))


def _score(trial: Any) -> Score:
    release = trial.user_attrs.get("release")
    accuracy, epsilon = trial.values
    return Score(
        accuracy, epsilon, trial.user_attrs.get("delta"), None if release is None else tuple(release)
    )


def _study(subject: Subject, out: Path, seed: int) -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigurationError(
            "`clipwise tune` needs Optuna, which is not installed: run `pip install 'clipwise[tune]'`."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # why a trial failed is told by us, in one line
    out.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            study_name=subject.name,
            storage=f"sqlite:///{out / FILE}",
            directions=["maximize", "minimize"],
            load_if_exists=True,
        )
    except Exception as error:  # of Optuna, of SQLAlchemy or of SQLite
        raise ConfigurationError(
            f"{out / FILE} cannot be opened as a study ({type(error).__name__}): give another folder with --out."
        ) from error
    # A study that goes on must not draw its first points again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    return study
