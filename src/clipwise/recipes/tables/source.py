"""TableSource: a CSV or Parquet file, and how its encoding is fixed from a schema and noised counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError
from clipwise.recipes.counts import NoisedCounts, ReleasedCounts
from clipwise.recipes.kind import ASSUMED_LABELS, Settings, Source
from clipwise.recipes.tables import defaults, statistics
from clipwise.recipes.tables.encoder import TableEncoder
from clipwise.recipes.tables.models import MODELS
from clipwise.recipes.tables.read import listed, read_table
from clipwise.recipes.tables.schema import Auto, Category, Hashed, Kind, Schema, Target
from clipwise.recipes.tables.statistics import Bins
from clipwise.recipes.tables.values import is_missing

# The name of the target among the strings of the noised counts; columns have their own names as histograms.
LABELS = "labels of the target"
# Common names of labels. Their counts are released in any case, so they need no threshold that protects single rows,
# only one that noise rarely reaches.
COMMON_LABELS = (
    *map(str, range(-1, 11)),
    *(word for low in ("no", "yes", "n", "y", "false", "true") for word in (low, low.capitalize(), low.upper())),
    *("negative", "positive", "neg", "pos", "bad", "good", "low", "medium", "high", "male", "female"),
)
# Standard deviations of the noise. Noise alone shows one of these labels in about one run of 100,000.
SURE = 5.0
# With more labels than this, a target of numbers is taken for a regression.
MOST_NUMERIC_LABELS = 10
# Numbers in so few bins may be labels: unless these are released, the task must be given.
MOST_FEW_BINS = 3
# Labels must cover at least this share of the rows.
LEAST_COVERED = 0.5
# The target gets the budget of this share of the columns.
TARGET_WEIGHT = 0.25
# The least and the largest weight of a class.
WEIGHTS = (0.1, 10.0)


@dataclass(frozen=True)
class Findings:
    """What follows from the noised counts.

    Args:
        kinds: the kind of each column that was not declared.
        target: the target, complete.
        label_counts: the noised counts of its labels, if they were released.
        remarks: lines for the statement, and a remark about each column by name.
    """

    kinds: dict[str, Kind]
    target: Target
    label_counts: tuple[float, ...]
    remarks: tuple[str, ...]
    about: dict[str, str]


class TableSource(Source):
    """A table in a file. Its rows are records; the names of its columns and its number of rows are public.

    Args:
        path: a CSV file, which may be compressed (.gz), or a Parquet file.
        target: the name of the column to predict; or that of the schema. None for data without it, to predict.
        labels: the classes of the target. Otherwise, unless the schema has them, noised counts name them.
        task: "classification" or "regression"; otherwise noised counts decide.
        schema: what is declared about the columns. Without one nothing is, and noised counts decide.
        encoding: of a CSV file; by default from its byte order mark, or UTF-8.
        balanced: weight each class by the inverse of its frequency, from noised counts.
    """

    kind: ClassVar[str] = "table"

    def __init__(
        self,
        path: Path,
        target: str | None = None,
        *,
        labels: Sequence[str] | None = None,
        task: str | None = None,
        schema: Schema | None = None,
        encoding: str | None = None,
        balanced: bool = False,
    ) -> None:
        self.path, self.table, self.balanced, self._encoding = path, read_table(path, encoding), balanced, encoding
        declared = _declared_target(target, labels, task, schema)
        names = list(self.table.columns)
        self.schema = Schema.undeclared(names, declared) if schema is None else replace(schema, target=declared)
        self._require_columns()
        columns = ", ".join(self.schema.columns)
        ending = f"; target: {declared.name}" if declared is not None else ""
        self.description = f"a {self.table.format} table with the columns {columns}{ending}"

    def __len__(self) -> int:
        return self.table.rows

    @property
    def has_target(self) -> bool:
        """Whether the file has the column to predict."""
        return self.schema.target is not None and self.schema.target.name in self.table.columns

    @property
    def models(self) -> tuple[str, ...]:
        return MODELS

    def require_groups(self, column: str) -> None:
        """Raise unless the column is declared as a category, and the target as a class."""
        if not isinstance(self.schema.columns.get(column), Category):
            raise ConfigurationError(
                f"--groups {column!r} is not possible: it is no input whose categories are declared. Declare it with "
                '--schema as kind = "category" with its values.'
            )
        target = self.schema.target
        if target is None or target.task != "classification":
            raise ConfigurationError(
                "--groups is for classification, and the target is not declared as one: give --labels or --task "
                "classification. The error of a regression has no groups."
            )

    def needs_counts(self) -> bool:
        """Whether a column, the labels or the range of the target, or the weights of the classes are not declared."""
        target = self.schema.target
        return bool(self._auto()) or target is None or not target.is_declared or self._needs_weights(target)

    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        """Settings chosen by experiments/recipes."""
        return defaults.settings(rows, epsilon, preset)

    def largest(self, rows: int, counts: NoisedCounts) -> TableEncoder:
        """Every undeclared column is text whose hashed values are all frequent."""
        target = self.schema.target
        assert target is not None
        plan = self._plan(target)
        buckets = Bins.suitable(rows, counts.std_of(plan.names, plan.weights)[plan.names[0]]).buckets
        kinds = dict.fromkeys(self._auto(), Hashed(buckets, tuple(range(buckets))))
        complete = target if target.is_declared else Target(target.name, labels=ASSUMED_LABELS)
        return TableEncoder(replace(self.schema, columns={**self.schema.columns, **kinds}, target=complete))

    def prepare(self, rows: NDArray[Any], counts: NoisedCounts | None) -> TableEncoder:
        """Fix the encoding. The rows are read only to count them; everything else follows from the noised counts."""
        target = self.schema.target
        if target is None:
            raise ConfigurationError("target is missing: name the column to predict.")
        if not self.has_target:
            raise ConfigurationError(f"{self.path} has no column {target.name!r}, the target.")
        if not self.needs_counts():
            found = Findings({}, target, (), (), {})
        elif counts is None:
            raise ConfigurationError("this table needs noised counts: its columns or its labels are not all declared.")
        else:
            found = self._count(np.asarray(rows), counts, target)
        return self._encoder(found)

    def count(self, rows: NDArray[Any], counts: NoisedCounts) -> Findings:
        """What noised counts of these rows show, without an encoder: for a draft of a schema."""
        target = self.schema.target
        return self._count(np.asarray(rows), counts, target)

    def _encoder(self, found: Findings) -> TableEncoder:
        kinds = {name: found.kinds.get(name, kind) for name, kind in self.schema.columns.items()}
        weights: tuple[float, ...] = ()
        if self.balanced and found.target.labels is not None:
            weights = _weights(found.label_counts, len(found.target.labels))
        declared = len(kinds) - len(found.kinds)
        lines = [f"{_columns(declared)} as declared in the schema"] if declared else []
        complete = replace(self.schema, columns=kinds, target=found.target)
        return TableEncoder(complete, weights, (*lines, *found.remarks), self._encoding)

    def _auto(self) -> list[str]:
        return [name for name, kind in self.schema.columns.items() if isinstance(kind, Auto)]

    def _needs_weights(self, target: Target) -> bool:
        return self.balanced and target.task != "regression"

    def _require_columns(self) -> None:
        absent = [name for name in self.schema.columns if name not in self.table.columns]
        if absent:
            raise ConfigurationError(
                f"{self.path} has no column {absent[0]!r}, which the schema or the training data has. "
                f"Its columns are {listed(self.table.columns)}."
            )
        target = self.schema.target
        if target is not None and target.name in self.schema.columns:
            raise ConfigurationError(f"The target {target.name!r} is also an input: take it out of [columns].")
        if not self.schema.columns:
            raise ConfigurationError(
                f"{self.path} has no column beside the target: there is nothing to predict it from."
            )

    def _count(self, rows: NDArray[Any], counts: NoisedCounts, target: Target | None) -> Findings:
        """One joint release: a histogram for each undeclared column, and what the target needs."""
        plan = self._plan(target)
        std = counts.std_of(plan.names, plan.weights)
        _require_enough(len(rows), plan, std, target)
        bins = Bins.suitable(len(rows), std[plan.names[0]])
        histograms = {name: (self._bins(name, bins)[rows], bins.count) for name in plan.histograms}
        strings = {}
        if plan.of_labels is not None:
            indices = {label: place for place, label in enumerate(plan.of_labels)}
            histograms[LABELS] = (self._labels(indices)[rows], len(indices))
        elif plan.needs_strings:
            strings[LABELS] = self._strings(rows)
        released = counts.release(histograms, strings, plan.weights, dict.fromkeys(strings, COMMON_LABELS))
        kinds, about = {}, {}
        for name in self._auto():
            kinds[name], about[name] = statistics.kind_of(released.histograms[name], released.std[name], bins)
        lines = []
        if kinds:
            noise = released.std[plan.histograms[0]]
            lines.append(f"{_columns(len(kinds))} by {_counts_with(noise)}:")
            lines += (f"{name}: {text}" for name, text in about.items())
        if target is None:
            return Findings(kinds, Target(""), (), tuple(lines), about)
        complete, label_counts, line = _target_from(target, released, bins, len(rows))
        return Findings(kinds, complete, label_counts, (*lines, *([line] if line else [])), about)

    def _plan(self, target: Target | None) -> _Plan:
        return _Plan(self._auto(), target, target is not None and self._needs_weights(target))

    def _bins(self, name: str, bins: Bins) -> NDArray[np.int64]:
        column = self.table.columns[name]
        found: NDArray[np.int64] = bins.of(column.cells, self.schema.missing, self.table.decimal)[column.codes_N]
        return found

    def _labels(self, indices: dict[str, int]) -> NDArray[np.int64]:
        assert self.schema.target is not None
        column = self.table.columns[self.schema.target.name]
        places = np.array([indices.get(cell.strip(), -1) for cell in column.cells], np.int64)
        found: NDArray[np.int64] = places[column.codes_N]
        return found

    def _strings(self, rows: NDArray[Any]) -> list[str | None]:
        assert self.schema.target is not None
        column = self.table.columns[self.schema.target.name]
        absent = is_missing(column.cells, self.schema.missing)
        cells = [None if gone else cell.strip() for cell, gone in zip(column.cells, absent, strict=True)]
        return [cells[code] for code in column.codes_N[rows].tolist()]


class _Plan:
    """Which histograms and strings are released. It depends on the schema alone."""

    def __init__(self, columns: list[str], target: Target | None, weighted: bool) -> None:
        self.of_labels = target.labels if target is not None and weighted else None
        open_target = target is not None and not target.is_declared
        self.needs_strings = open_target and target is not None and target.task != "regression"
        needs_numbers = open_target and target is not None and target.task != "classification"
        self.histograms = [*columns, *([target.name] if target is not None and needs_numbers else [])]
        labels = [LABELS] if self.needs_strings or self.of_labels is not None else []
        self.names = [*self.histograms, *labels]
        weight = max(1.0, TARGET_WEIGHT * len(columns))
        of_target = [*labels, *([target.name] if target is not None and needs_numbers else [])]
        self.weights = dict.fromkeys(of_target, weight)


def _require_enough(rows: int, plan: _Plan, std: Mapping[str, float], target: Target | None) -> None:
    """Raise before the release if no count of so few rows, their public number, can be above the noise."""
    if target is None or target.is_declared:
        return
    if rows <= SURE * std[LABELS if plan.needs_strings else target.name]:
        raise ConfigurationError(
            f"With {rows} training row{'s' * (rows != 1)} and this budget, noised counts cannot show the labels or the "
            f"range of the target {target.name!r}: give --labels, or declare the target in a schema file."
        )


def _declared_target(
    name: str | None, labels: Sequence[str] | None, task: str | None, schema: Schema | None
) -> Target | None:
    """The target of the arguments and of the schema; the arguments come first."""
    declared = schema.target if schema is not None else None
    if name is None and declared is None:
        return None
    if declared is None or name not in (None, declared.name):
        declared = Target(str(name))
    if task is not None and task != declared.task:
        declared = Target(declared.name, task)
    return declared if labels is None else Target(declared.name, task, tuple(str(each).strip() for each in labels))


def _target_from(
    target: Target, released: ReleasedCounts, bins: Bins, rows: int
) -> tuple[Target, tuple[float, ...], str]:
    """The complete target, the noised counts of its labels, and a line for the statement."""
    if target.labels is not None:
        of_labels = released.histograms.get(LABELS)
        if of_labels is None:
            return target, (), ""
        line = f"weights of {len(target.labels)} declared labels by {_counts_with(released.std[LABELS])}"
        return target, tuple(float(x) for x in of_labels), line
    if target.range is not None:
        return target, (), ""
    shown = dict(released.strings.get(LABELS, {}))
    least = SURE * released.std.get(LABELS, 0.0)
    shown |= {text: count for text, count in released.candidates.get(LABELS, {}).items() if count > least}
    shown = dict(sorted(shown.items()))
    bounds = None
    if target.name in released.histograms:
        bounds, distinct = statistics.range_of(released.histograms[target.name], released.std[target.name], bins)
        if target.task is None and distinct <= MOST_FEW_BINS and sum(shown.values()) < LEAST_COVERED * rows:
            bounds = None  # labels that the noise hides, or numbers close together: the user must declare the task
    many = len(shown) > MOST_NUMERIC_LABELS or sum(shown.values()) < LEAST_COVERED * rows
    if target.task == "regression" or (target.task is None and bounds is not None and many):
        if bounds is None:
            raise ConfigurationError(
                f"The range of the target {target.name!r} is hidden by the noise, or it has no numbers: declare it in "
                "a schema ([target] range = [LOW, HIGH]), or raise epsilon."
            )
        how = "noised" if released.std[target.name] else "exact"
        low, high = map(statistics.shown, bounds)
        line = f"the target is a number from {low} to {high}, by {how} counts"
        return Target(target.name, range=bounds), (), line
    if len(shown) < 2:
        raise ConfigurationError(
            f"The labels of the target {target.name!r} cannot be released: fewer than two are frequent enough for the "
            "noise. Give them with --labels, raise epsilon, or use --task regression if it is a number."
        )
    line = (
        f"{len(shown)} labels by {_counts_with(released.std[LABELS])}, at least {released.thresholds[LABELS]}; rows "
        "with other labels are not trained on, and count as wrong"
    )
    return Target(target.name, labels=tuple(shown)), tuple(float(x) for x in shown.values()), line


def _counts_with(std: float) -> str:
    """Without privacy there is no noise. All counts of a run are one mechanism."""
    return f"noised counts (one Gaussian mechanism, standard deviation {std:.4g} per count)" if std else "exact counts"


def _columns(count: int) -> str:
    return f"{count} column{'s' * (count != 1)}"


def _weights(counts: tuple[float, ...], labels: int) -> tuple[float, ...]:
    """Weights of the classes: the inverse of their noised frequencies, with mean about 1, within public limits."""
    positive = np.maximum(np.asarray(counts), 1.0)
    found = np.clip(positive.sum() / (labels * positive), *WEIGHTS)
    return tuple(float(f"{x:.6g}") for x in found)
