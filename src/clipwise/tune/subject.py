"""What is tuned (a recipe, or a user's own script) and the space of a search: ranges and lists."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Range:
    """All numbers from low to high; log-uniform if `log`; whole numbers if `whole`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        given = f"Range({self.low:g}, {self.high:g}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigurationError(f"{given}) is empty: give two finite numbers, the smaller one first.")
        if self.log and self.low <= 0:
            raise ConfigurationError(f"{given}, log=True): low must be above 0.")
        if self.whole and math.ceil(self.low) > math.floor(self.high):
            raise ConfigurationError(f"{given}, whole=True) holds no whole number: give wider ends.")

    def at(self, u: float) -> float | int:
        """The number at the fraction u in [0, 1] of the range."""
        value: float
        if self.log:
            value = self.low * (self.high / self.low) ** float(u)
        else:
            value = self.low + (self.high - self.low) * u
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value


@dataclass(frozen=True)
class Choice:
    """One of a list."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError("Choice(()) is empty: give at least one value.")

    def at(self, u: float) -> Any:
        """The value at the fraction u in [0, 1] of the list."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]


Dimension = Range | Choice
Space = Mapping[str, Dimension]


def point(space: Space, u: Sequence[float]) -> dict[str, Any]:
    """The point of a space at coordinates in [0, 1], one per dimension, in the order of the space."""
    return {name: dimension.at(at) for (name, dimension), at in zip(space.items(), u, strict=True)}


def described(space: Space) -> dict[str, dict[str, Any]]:
    """A space in plain types, for a file."""
    found: dict[str, dict[str, Any]] = {}
    for name, d in space.items():
        if isinstance(d, Choice):
            found[name] = {"values": [plain(value) for value in d.values]}
        else:
            ends = {"low": float(d.low), "high": float(d.high)}
            found[name] = {**ends, "log": bool(d.log), "whole": bool(d.whole)}
    return found


def plain(value: Any) -> Any:
    """A value of a list in plain types, the same in every process."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))  # the address of a function changes between processes


Settings = Mapping[str, Any]
# The settings of a recipe that decide the privacy of a run.
DECIDE_PRIVACY = ("noise_multiplier", "sample_rate", "batch_size", "epochs")


@dataclass(frozen=True)
class Score:
    """Accuracy of a run on held-out records, from 0 to 1, and its epsilon at delta.

    `release` is (noise multiplier, sampling rate, steps) if known. Runs with it can be composed.
    """

    accuracy: float
    epsilon: float
    delta: float | None = None
    release: tuple[float, float, int] | None = None


@dataclass(frozen=True)
class Point(Score):
    """A finished run of a search."""

    number: int = 0
    settings: Settings = field(default_factory=dict)


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that no other exceeds in accuracy at a smaller epsilon, sorted by epsilon."""
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.epsilon, -p.accuracy, p.number)):  # the first of equal ones
        if not found or p.accuracy > found[-1].accuracy:
            found.append(p)
    return found


@dataclass(frozen=True)
class Subject:
    """Something to tune. A study continues under the same name."""

    name: str
    space: Space
    score: Callable[[Settings], Score]


@dataclass(frozen=True)
class Run:
    """One private run of a recipe.

    Attributes:
        right, size: right answers on the validation part, and the size of that part, which is public.
        release: (noise multiplier, sampling rate, steps).
    """

    right: int
    size: int
    model: nn.Module
    epsilon: float
    release: tuple[float, float, int]


@dataclass(frozen=True)
class Recipe:
    """Data, a network and a space. The releases of each run are known, so a search over them can be accounted for.

    Attributes:
        space: the settings to choose from.
        delta: the delta of every run.
        train: trains one run, from settings and the seed of the initial weights. It takes `sample_rate`, even if the
            space does not have it.
    """

    name: str
    space: Space
    delta: float
    train: Callable[[Settings, int], Run]

    @property
    def free_space(self) -> Space:
        """The part of the space that does not change the cost of a run."""
        return {name: dimension for name, dimension in self.space.items() if name not in DECIDE_PRIVACY}

    def subject(self, seed: int) -> Subject:
        """For an ordinary search."""

        def score(settings: Settings) -> Score:
            run = self.train(settings, seed)
            return Score(run.right / run.size, run.epsilon, self.delta, run.release)

        return Subject(self.name, self.space, score)


def of_script(file: Path, function: str = "train") -> Subject:
    """A Python file with `SPACE`, from names to `Range` or `Choice`, and `train(settings)` -> (accuracy, epsilon).

    Accuracy is from 0 to 1. The file runs in this process as "clipwise_tune", so its "__main__" block does not run.
    """
    if not file.is_file():
        raise ConfigurationError(f"The script {str(file)!r} does not exist.")
    found = runpy.run_path(str(file), run_name="clipwise_tune")
    space, train = found.get("SPACE"), found.get(function)
    if not (isinstance(space, Mapping) and space and callable(train)):
        raise ConfigurationError(
            f"{file.name} must define SPACE, a dict from names to clipwise.tune.Range or Choice, and "
            f"{function}(settings), which returns (accuracy, epsilon)."
        )
    for name, dimension in space.items():
        if not isinstance(dimension, Dimension):
            kind = type(dimension).__name__
            raise ConfigurationError(f"{file.name}: SPACE[{name!r}] is {kind}: use clipwise.tune.Range or Choice.")
    where = f"{file.name}: {function}(settings)"
    return Subject(file.stem, space, lambda settings: _checked(train(dict(settings)), where))


def _checked(given: Any, where: str) -> Score:
    try:
        accuracy, epsilon = (float(value) for value in given)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{where} must return (accuracy, epsilon).") from None
    if not 0 <= accuracy <= 1:
        raise ConfigurationError(
            f"{where} returned an accuracy that is not a number from 0 to 1: return the share of right "
            "answers, 0.95 for 95%."
        )
    if not epsilon >= 0:
        raise ConfigurationError(
            f"{where} returned an epsilon that is not a number of at least 0: return the cost of the run, "
            "private.spent().epsilon."
        )
    return Score(accuracy, epsilon)
