"""What is tuned: a named data set with a named method, or a user's own script."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipwise.errors import ConfigurationError
from clipwise.tune.records import Records, names, records
from clipwise.tune.space import Choice, Range, Space, paper_space
from clipwise.tune.training import run
from clipwise.tune.trial import METHODS, Trial, require_bounded
from clipwise.validation.arguments import one_of
from experiments.models.lipschitz_blocks import KINDS

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """What a run came to: accuracy on records that it was not trained on, from 0 to 1, and epsilon at delta.

    `release`, where it is known, is (noise multiplier, sampling rate, steps): with it many runs are composed.
    """

    accuracy: float
    epsilon: float
    delta: float | None = None
    release: tuple[float, float, int] | None = None


@dataclass(frozen=True)
class Subject:
    """Something to tune.

    Attributes:
        name: of the study, which goes on under the same name.
        space: what may be chosen.
        score: one run.
    """

    name: str
    space: Space
    score: Callable[[Settings], Score]


def named(
    data: str, method: str, norm: str, folder: Path | None, device: torch.device, seed: int = 0
) -> Subject:
    """A data set by name, over the space of the weight-clipping paper's table 3, judged by a validation part."""
    if data not in names():
        raise ConfigurationError(
            f"{data!r} is no data set and no script: give one of {', '.join(names())}, or a file that ends in .py."
        )
    if method not in METHODS or method == "plain":
        choices = ", ".join(map(repr, METHODS[:-1]))
        raise ConfigurationError(f"method={method!r} is not known: use one of {choices}.")
    one_of("norm", norm, KINDS)
    require_bounded(method, norm)
    at_hand = records(data, folder, device)
    space = paper_space(norm)
    return Subject(f"{data}/{norm}/{method}", space, lambda s: _scored(data, method, norm, at_hand, s, seed))


def _scored(data: str, method: str, norm: str, at_hand: Records, settings: Settings, seed: int) -> Score:
    found = run(Trial(data, method, norm, **settings), at_hand, seed)
    rate = min(1.0, settings["batch_size"] / len(at_hand.train))
    return Score(
        found["accuracy"],
        found["epsilon"],
        at_hand.delta,
        (found["noise_multiplier"], rate, found["steps"]),
    )


def of_script(file: Path) -> Subject:
    """A Python file with `SPACE`, from names to `Range` or `Choice`, and `train(settings)` -> (accuracy, epsilon).

    Accuracy is a share, from 0 to 1.
    It runs in this process, under the name "clipwise_tune", so that what it does as "__main__" is left out.
    """
    if not file.is_file():
        raise ConfigurationError(f"The script {str(file)!r} does not exist.")
    found = runpy.run_path(str(file), run_name="clipwise_tune")
    space, train = found.get("SPACE"), found.get("train")
    if not (isinstance(space, Mapping) and space and callable(train)):
        raise ConfigurationError(
            f"{file.name} must define SPACE, a dict from names to clipwise.tune.Range or Choice, and "
            "train(settings), which returns (accuracy, epsilon)."
        )
    for name, dimension in space.items():
        if not isinstance(dimension, (Range, Choice)):
            raise ConfigurationError(
                f"{file.name}: SPACE[{name!r}] is {type(dimension).__name__}: use clipwise.tune.Range or Choice."
            )
    return Subject(file.stem, space, lambda settings: _checked(train(dict(settings)), file.name))


def _checked(given: Any, name: str) -> Score:
    try:
        accuracy, epsilon = (float(value) for value in given)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name}: train(settings) must return (accuracy, epsilon).") from None
    if not 0 <= accuracy <= 1:
        raise ConfigurationError(
            f"{name}: train(settings) returned an accuracy that is no number from 0 to 1: return the share of right "
            "answers, 0.95 for 95%."
        )
    if not epsilon >= 0:
        raise ConfigurationError(
            f"{name}: train(settings) returned an epsilon that is no number of at least 0: return what the run "
            "costs, as private.spent().epsilon says it."
        )
    return Score(accuracy, epsilon)
