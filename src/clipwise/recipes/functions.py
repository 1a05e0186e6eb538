"""Your own model, data set and loss as the data of `clipwise train`: `module:function`.

The function takes no arguments and returns (model, data set, loss): a module, a map-style data set whose records are
tuples of tensors, and `loss(model, *batch)` with one loss per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from clipwise.errors import ConfigurationError
from clipwise.recipes.kind import Encoder, Settings, Source, Task
from clipwise.recipes.target import call
from clipwise.sampling.fetch import length_of

_VALUES = (Tensor, np.ndarray, np.generic, int, float)  # what becomes tensors in a batch


class FunctionSource(Source):
    """The data set that a function returns."""

    kind: ClassVar[str] = "function"
    has_figures: ClassVar[bool] = False

    def __init__(self, target: str) -> None:
        self.target = target
        self.model, self.data, self.loss = made_by(target)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigurationError(f"{target} returns a model without parameters to train: set requires_grad=True.")
        self.description = f"the data set that {target} returns"

    def __len__(self) -> int:
        return length_of(self.data)

    @property
    def models(self) -> tuple[str, ...]:
        return (type(self.model).__name__,)

    def needs_counts(self) -> bool:
        return False

    def defaults(self, rows: int, epsilon: float, preset: str) -> Settings:
        return Settings(type(self.model).__name__, max(1, min(rows, 256)), 10, 0.1)

    def prepare(self, rows: np.ndarray, counts: object) -> FunctionEncoder:
        for record in (self.data[row] for row in rows[:1].tolist()):
            if not isinstance(record, (tuple, list)) or not all(isinstance(value, _VALUES) for value in record):
                raise ConfigurationError(
                    f"A record of the data set of {self.target} must be a tuple of tensors or numbers: return one in "
                    "__getitem__."
                )
        return FunctionEncoder(self.target, self.loss)


class FunctionEncoder(Encoder):
    """Records as the data set gives them."""

    kind: ClassVar[str] = "function"
    task = Task()

    def __init__(self, target: str, loss: Callable[..., Tensor]) -> None:
        self.target, self._loss = target, loss
        self.preprocessing = (f"whatever {target} does before it returns the data set; clipwise does not see it",)

    def encode(self, source: Source, rows: np.ndarray | None = None) -> TensorDataset:
        assert isinstance(source, FunctionSource)
        found: Any = source.data if rows is None else Subset(source.data, rows.tolist())
        return found  # type: ignore[no-any-return]

    def inputs(self, source: Source) -> tuple[Tensor, ...]:
        raise self._unknown("predictions")

    def model(self, name: str) -> nn.Module:
        """A new model: the function is called again."""
        model = made_by(self.target)[0]
        if name != type(model).__name__:
            raise ConfigurationError(f"--model {name!r} is not possible: {self.target} returns the model.")
        return model

    def batch_loss(self, model: nn.Module) -> Callable[..., Tensor]:
        """One loss per example, from the tensors of a batch."""
        return lambda *batch: self._loss(model, *batch)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        raise self._unknown("a loss of outputs")

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FunctionEncoder:
        target = str(data["target"])
        return cls(target, made_by(target)[2])

    def open(self, path: Path) -> Source:
        raise self._unknown("further data")

    def _unknown(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.target} gives a model, a data set and a loss, so clipwise cannot make {what}: load "
            "model.safetensors into your model and use it in your own code."
        )


def made_by(target: str) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    """Call the function."""
    found = call(target, "DATA")
    if isinstance(found, tuple) and len(found) == 3:
        model, data, loss = found
        if isinstance(model, nn.Module) and callable(loss) and hasattr(data, "__getitem__"):
            return model, data, loss
    raise ConfigurationError(
        f"{target} must return (model, data set, loss): a torch.nn.Module, a map-style data set, and a function "
        "loss(model, *batch) that returns one loss per example."
    )
