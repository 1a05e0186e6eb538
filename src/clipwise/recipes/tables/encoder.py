"""TableEncoder: the fixed encoding of a table's rows, its models and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.kind import Encoder, Source, Task
from clipwise.recipes.tables.encode import encoded, width
from clipwise.recipes.tables.models import table_model
from clipwise.recipes.tables.schema import Category, Schema
from clipwise.recipes.tables.values import is_missing, numbers

if TYPE_CHECKING:
    from clipwise.recipes.tables.source import TableSource

# The target of a row without a known label. Its loss is 0, so the row is never trained on; it still counts in N.
UNKNOWN = -1


class TableEncoder(Encoder):
    """A complete schema: every column has a kind, and the target has labels or a range.

    Args:
        schema: complete, without undeclared columns.
        label_weights: the weight of each label in the loss; empty for equal weights.
        preprocessing: lines for the statement.
        encoding: of CSV files; None for UTF-8 or that of the byte order mark.
    """

    kind: ClassVar[str] = "table"

    def __init__(
        self,
        schema: Schema,
        label_weights: tuple[float, ...] = (),
        preprocessing: tuple[str, ...] = (),
        encoding: str | None = None,
    ) -> None:
        assert schema.target is not None and schema.target.is_declared
        self.schema, self.target = schema, schema.target
        self.label_weights, self.preprocessing, self.encoding = label_weights, preprocessing, encoding
        self.task = Task(self.target.labels, self.target.range)
        self.width = sum(width(kind) for kind in schema.columns.values())
        if not self.width:
            raise ConfigurationError(
                "No column is left as an input: all are ignored, or text without frequent values. Declare them in a "
                "schema, or raise epsilon."
            )

    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        """Inputs, float32 [N, D], and targets: int64 [N] with -1 for unknown labels, or float32 [N] within the range.

        A missing target of a regression is nan; its loss is 0.
        """
        table = _table(source)
        if not table.has_target:
            raise ConfigurationError(f"{table.path} has no column {self.target.name!r}, the target.")
        return TensorDataset(self._inputs(table, rows), self._targets(table, rows))

    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        """float32 [N, D]."""
        return (self._inputs(_table(source), None),)

    def model(self, name: str) -> nn.Module:
        """ "linear" or "mlp"."""
        outputs = 1 if self.target.labels is None else len(self.target.labels)
        return table_model(name, self.width, outputs, self.target.range)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, or the squared error in units of half the range."""
        if self.target.range is None:
            weight = torch.tensor(self.label_weights, device=output.device) if self.label_weights else None
            return F.cross_entropy(output, target, weight=weight, ignore_index=UNKNOWN, reduction="none")
        low, high = self.target.range
        known = torch.where(torch.isnan(target), output.detach(), target)
        return ((output - known) / ((high - low) / 2)).square()

    def synthetic(self, rows: int) -> TensorDataset:
        """Synthetic rows with the shapes of `encode`."""
        x_ND = torch.rand(rows, self.width)
        if self.target.labels is not None:
            return TensorDataset(x_ND, torch.arange(rows) % len(self.target.labels))
        assert self.target.range is not None
        return TensorDataset(x_ND, torch.linspace(*self.target.range, rows))

    def groups(self, source: Source, column: str, rows: np.ndarray | None) -> tuple[tuple[str, ...], np.ndarray]:
        """The categories of a column, which are declared or released; all other values are one more group."""
        kind = self.schema.columns.get(column)
        table = _table(source)
        if not isinstance(kind, Category):
            raise ConfigurationError(
                f"--groups {column!r} is not possible: it is no column with known categories. Declare it in a schema "
                'as kind = "category" with its values.'
            )
        cells = table.table.columns[column]
        place_of = {value: place for place, value in enumerate(kind.values)}
        code_of = np.array([place_of.get(cell.strip(), len(kind.values)) for cell in cells.cells], np.int64)
        codes_N = cells.codes_N if rows is None else cells.codes_N[rows]
        return (*kind.values, "other values"), code_of[codes_N]

    def to_dict(self) -> dict[str, Any]:
        """The encoding in types that TOML and JSON share."""
        return {
            "kind": self.kind,
            "schema": self.schema.to_dict(),
            "label_weights": list(self.label_weights),
            "preprocessing": list(self.preprocessing),
        } | ({} if self.encoding is None else {"encoding": self.encoding})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TableEncoder:
        """The inverse of `to_dict`."""
        weights = tuple(float(x) for x in data.get("label_weights", ()))
        schema = Schema.from_dict(data["schema"], "encoding")
        return cls(schema, weights, tuple(data.get("preprocessing", ())), data.get("encoding"))

    def open(self, path: Path, encoding: str | None = None) -> TableSource:
        """A further table with the same columns, by default in the same encoding. It may lack the target."""
        from clipwise.recipes.tables.source import TableSource  # it imports this module

        return TableSource(path, schema=self.schema, encoding=encoding or self.encoding)

    def _inputs(self, source: TableSource, rows: np.ndarray | None) -> Tensor:
        count = len(source) if rows is None else len(rows)
        x_ND = np.empty((count, self.width), np.float32)
        start = 0
        for name, kind in self.schema.columns.items():
            if end := width(kind):
                end += start
                column = source.table.columns[name]
                codes_N = column.codes_N if rows is None else column.codes_N[rows]
                cells = encoded(kind, column.cells, self.schema.missing, source.table.decimal)
                np.take(cells, codes_N, axis=0, out=x_ND[:, start:end])
                start = end
        return torch.from_numpy(x_ND)

    def _targets(self, source: TableSource, rows: np.ndarray | None) -> Tensor:
        column = source.table.columns[self.target.name]
        codes_N = column.codes_N if rows is None else column.codes_N[rows]
        if self.target.labels is not None:
            place_of = {label: place for place, label in enumerate(self.target.labels)}
            labels = np.array([place_of.get(cell.strip(), UNKNOWN) for cell in column.cells], np.int64)
            return torch.from_numpy(labels[codes_N])
        assert self.target.range is not None
        value = np.clip(numbers(column.cells, source.table.decimal), *self.target.range)
        value[is_missing(column.cells, self.schema.missing)] = np.nan
        return torch.from_numpy(value.astype(np.float32)[codes_N])


def _table(source: Source) -> TableSource:
    from clipwise.recipes.tables.source import TableSource  # it imports this module

    if not isinstance(source, TableSource):
        raise ConfigurationError(
            f"This run was trained on a table, and this is {source.kind}: give a CSV or Parquet file."
        )
    return source
