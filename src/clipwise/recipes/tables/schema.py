"""The schema of a table: what is declared about each column and the target, as a TOML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from clipwise.errors import ConfigurationError
from clipwise.recipes import toml
from clipwise.recipes.tables.values import MISSING, to_date, to_day

FORMAT = 1
TASKS = ("classification", "regression")
MOST_BUCKETS = 2**16


class _Declared:
    """What is declared about a column."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The entry in TOML types."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Number(_Declared):
    """A column of numbers.

    `points` are mapped to equal steps from -1 to 1, with straight lines between them: two points are bounds, more are
    quantiles. Cells that are no numbers count as missing.
    """

    points: tuple[float, ...]
    kind: ClassVar[str] = "number"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"bounds" if len(self.points) == 2 else "quantiles": list(self.points)}


@dataclass(frozen=True)
class Category(_Declared):
    """A column with these values. All others share one input."""

    values: tuple[str, ...]
    kind: ClassVar[str] = "category"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"values": list(self.values)}


@dataclass(frozen=True)
class Hashed(_Declared):
    """A column of text of unknown domain, hashed into buckets. Buckets that are not `kept` share one input."""

    buckets: int
    kept: tuple[int, ...]
    kind: ClassVar[str] = "hashed"

    def to_dict(self) -> dict[str, Any]:
        every = self.kept == tuple(range(self.buckets))
        return super().to_dict() | {"buckets": self.buckets} | ({} if every else {"kept": list(self.kept)})


@dataclass(frozen=True)
class Date(_Declared):
    """A column of dates, as days since 1970, between two bounds."""

    low: float
    high: float
    kind: ClassVar[str] = "date"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"bounds": [to_date(self.low).isoformat(), to_date(self.high).isoformat()]}


@dataclass(frozen=True)
class Mixed(_Declared):
    """A column about which nothing is known: numbers are read as such, and other cells are hashed."""

    points: tuple[float, ...]
    buckets: int
    kind: ClassVar[str] = "mixed"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"quantiles": list(self.points), "buckets": self.buckets}


@dataclass(frozen=True)
class Ignored(_Declared):
    """A column that is not used."""

    kind: ClassVar[str] = "ignored"


@dataclass(frozen=True)
class Auto(_Declared):
    """A column that is not declared. Noised counts decide, and take a share of the budget."""

    kind: ClassVar[str] = "auto"


Kind: TypeAlias = "Number | Category | Hashed | Date | Mixed | Ignored | Auto"


@dataclass(frozen=True)
class Target:
    """The column to predict.

    Args:
        name: the name of the column.
        task: "classification" or "regression"; None lets noised counts decide.
        labels: the classes, in order; None lets noised counts name them.
        range: the least and the largest value of a regression target; None lets noised counts decide.
    """

    name: str
    task: str | None = None
    labels: tuple[str, ...] | None = None
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, *TASKS):
            raise ConfigurationError(f"task={self.task!r} is not known: use 'classification' or 'regression'.")
        if self.labels is not None:
            if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
                raise ConfigurationError("labels: give at least two labels, each once.")
            if self.task == "regression":
                raise ConfigurationError("labels belong to a classification: leave them out, or change the task.")
            object.__setattr__(self, "task", "classification")
        if self.range is not None:
            if not (_finite(self.range) and self.range[0] < self.range[1]):
                raise ConfigurationError("range of the target: give two finite numbers, the smaller one first.")
            if self.task == "classification":
                raise ConfigurationError("a range belongs to a regression: leave it out, or change the task.")
            object.__setattr__(self, "task", "regression")

    @property
    def is_declared(self) -> bool:
        """Whether the task is complete without noised counts."""
        return self.labels is not None or self.range is not None


@dataclass(frozen=True)
class Schema:
    """What is declared about a table. Columns that are not in it are ignored."""

    columns: Mapping[str, Kind]
    target: Target | None = None
    missing: tuple[str, ...] = field(default=MISSING)

    @classmethod
    def undeclared(cls, names: Sequence[str], target: Target | None = None) -> Schema:
        """Nothing but the names of the columns."""
        return cls({name: Auto() for name in names if target is None or name != target.name}, target)

    def to_dict(self) -> dict[str, Any]:
        """The schema in TOML types."""
        found: dict[str, Any] = {"format": FORMAT, "missing": list(self.missing)}
        if self.target is not None:
            found["target"] = _target_dict(self.target)
        return found | {"columns": {name: kind.to_dict() for name, kind in self.columns.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], place: str = "schema") -> Schema:
        """The inverse of `to_dict`; errors name `place`."""
        if data.get("format", FORMAT) != FORMAT:
            raise ConfigurationError(f"{place}: this format is not known to this version of clipwise.")
        if unknown := sorted(set(data) - {"format", "missing", "target", "columns"}):
            raise ConfigurationError(f"{place}: {unknown[0]!r} is not known: use missing, [target] and [columns.NAME].")
        columns = {str(n): _kind(each, f"{place}, column {n!r}") for n, each in _table(data, "columns", place).items()}
        missing = _texts(data["missing"], f"{place}, missing") if "missing" in data else MISSING
        return cls(columns, _target(_table(data, "target", place), place) if "target" in data else None, missing)


def read_schema(path: Path) -> Schema:
    """Read a schema file."""
    return Schema.from_dict(toml.read(path), str(path))


def write_toml(schema: Schema, comments: Mapping[str, str] | None = None, head: str = "") -> str:
    """The schema as TOML, with a comment above the entry of each column, of "missing" and of "[target]"."""
    comments = comments or {}

    def entry(title: str, values: Mapping[str, Any], comment: str) -> list[str]:
        note = [f"# {line}" for line in comment.splitlines()]
        return ["", *note, title, *(f"{key} = {toml.value_text(value)}" for key, value in values.items())]

    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [f"format = {FORMAT}", *(f"# {line}" for line in comments.get("missing", "").splitlines())]
    lines += [f"missing = {toml.value_text(schema.missing)}"]
    if schema.target is not None:
        lines += entry("[target]", _target_dict(schema.target), comments.get("[target]", ""))
    for name, kind in schema.columns.items():
        lines += entry(f"[columns.{toml.value_text(name)}]", kind.to_dict(), comments.get(name, ""))
    return "\n".join(lines) + "\n"


def _target_dict(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = {"name": target.name}
    found |= {} if target.task is None else {"task": target.task}
    found |= {} if target.labels is None else {"labels": list(target.labels)}
    return found | ({} if target.range is None else {"range": list(target.range)})


def _target(data: Mapping[str, Any], place: str) -> Target:
    where = f"{place}, [target]"
    if not isinstance(data.get("name"), str):
        raise ConfigurationError(f"{where}: name is missing: give the name of the column to predict.")
    if unknown := sorted(set(data) - {"name", "task", "labels", "range"}):
        raise ConfigurationError(f"{where}: {unknown[0]!r} is not known: use name, task, labels and range.")
    labels = _texts(data["labels"], f"{where}, labels") if "labels" in data else None
    bounds = _bounds(data["range"], f"{where}, range") if "range" in data else None
    try:
        return Target(data["name"], data.get("task"), labels, bounds)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _kind(data: Any, place: str) -> Kind:
    """One entry of [columns]."""
    readers: dict[str, Callable[[], Kind]] = {
        "number": lambda: _number(data, place),
        "category": lambda: Category(_texts(data.get("values"), f"{place}, values")),
        "hashed": lambda: _hashed(data, place),
        "date": lambda: _date(data.get("bounds"), place),
        "mixed": lambda: Mixed(_number(data, place).points, _buckets(data, place)),
        "ignored": Ignored,
        "auto": Auto,
    }
    if not isinstance(data, Mapping) or data.get("kind") not in readers:
        raise ConfigurationError(f"{place}: kind must be one of {', '.join(readers)}.")
    return readers[data["kind"]]()


def _number(data: Mapping[str, Any], place: str) -> Number:
    if "quantiles" in data:
        found = _floats(data["quantiles"], f"{place}, quantiles")
        if not found or list(found) != sorted(found):
            raise ConfigurationError(f"{place}, quantiles: give finite numbers in rising order.")
        return Number(found)
    if "bounds" not in data:
        raise ConfigurationError(f'{place}: a number needs bounds = [LOW, HIGH], or use kind = "auto".')
    return Number(_bounds(data["bounds"], f"{place}, bounds"))


def _hashed(data: Mapping[str, Any], place: str) -> Hashed:
    buckets = _buckets(data, place)
    kept = data.get("kept", range(buckets))
    if not isinstance(kept, (list, tuple, range)) or not all(_is_whole(k) and 0 <= k < buckets for k in kept):
        raise ConfigurationError(f"{place}, kept: give numbers of buckets, from 0 to {buckets - 1}.")
    return Hashed(buckets, tuple(sorted(set(kept))))


def _buckets(data: Mapping[str, Any], place: str) -> int:
    found = data.get("buckets")
    if not _is_whole(found) or not 1 <= found <= MOST_BUCKETS:  # type: ignore[operator]
        raise ConfigurationError(f"{place}, buckets: give a whole number from 1 to {MOST_BUCKETS}.")
    return int(found)  # type: ignore[arg-type]


def _date(data: Any, place: str) -> Date:
    try:
        low, high = (to_day(each if isinstance(each, date) else date.fromisoformat(each)) for each in data)
    except (TypeError, ValueError):
        raise ConfigurationError(f'{place}, bounds: give two dates, such as ["2000-01-01", "2030-12-31"].') from None
    if not low < high:
        raise ConfigurationError(f"{place}, bounds: the first date must be before the second.")
    return Date(low, high)


def _bounds(data: Any, place: str) -> tuple[float, float]:
    found = _floats(data, place)
    if len(found) != 2 or not found[0] < found[1]:
        raise ConfigurationError(f"{place}: give two finite numbers, the smaller one first.")
    return found[0], found[1]


def _floats(data: Any, place: str) -> tuple[float, ...]:
    if not isinstance(data, (list, tuple)) or not all(isinstance(x, (int, float)) and _finite([x]) for x in data):
        raise ConfigurationError(f"{place}: give a list of finite numbers.")
    return tuple(float(x) for x in data)


def _texts(data: Any, place: str) -> tuple[str, ...]:
    if not isinstance(data, (list, tuple)) or not all(isinstance(x, str) for x in data) or len(set(data)) < len(data):
        raise ConfigurationError(f'{place}: give a list of different texts in quotes, such as ["no", "yes"].')
    return tuple(data)


def _table(data: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{place}: {key} must be a table of TOML.")
    return found


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(x) for x in values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
