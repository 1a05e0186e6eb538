"""Data that is public, and marked so by its type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipwise.errors import ClipwiseError, ConfigurationError
from clipwise.sampling import Fetcher
from clipwise.sampling.batch_structure import map_tensors
from clipwise.validation.arguments import whole

Loss = Callable[..., Tensor]


class Public:
    """Data that anybody may see, with its loss. Wrapping a data set in this says that no record of it is private.

    Nothing that is computed from it alone is noised or accounted for. That it was used, and for what, is in the
    privacy statement: its name and its size, and never what it holds.

    Args:
        data: a map-style data set, or batches: a list, a tuple or a `DataLoader` of them.
        loss: `loss(model, *batch)` gives one loss an example, as in the training loop; a single number will do where
            norms are those of mini-sets (`of="mini-set"`).
        batch_size: how many examples go through the model at a time. Batches come as they are.
        name: how the statement calls the data; by default the name of its type.
        collate_fn: from a list of records to a batch, for a data set.
    """

    def __init__(
        self,
        data: Any,
        loss: Loss,
        batch_size: int = 256,
        name: str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not callable(loss):
            raise ConfigurationError(
                "Public: loss must be a function loss(model, *batch) -> one loss an example."
            )
        self.data = data
        self.loss, self.batch_size = loss, whole("Public: batch_size", batch_size, least=1)
        self.name = type(data).__name__ if name is None else name
        self._batches: Sequence[Any] | DataLoader[Any] | None = None
        self._fetcher: Fetcher | None = None
        if isinstance(data, (list, tuple)) and any(isinstance(member, Tensor) for member in data):
            raise ConfigurationError(
                f"Public: data is a {type(data).__name__} of tensors, which may be columns or batches: give "
                "TensorDataset(x, y) for columns, or a list with a tuple (x, y) for each batch."
            )
        if isinstance(data, (list, tuple, DataLoader)):
            self._batches = data
            self.size = len(data)
        else:
            if isinstance(data, (Iterator, Tensor)) or not hasattr(data, "__getitem__"):
                raise ConfigurationError(
                    f"Public: data is a {type(data).__name__}, which cannot be read again and again in batches: give "
                    "a map-style data set, or a list of batches."
                )
            self._fetcher = Fetcher(data, collate_fn)
            self.size = self._fetcher.dataset_size
        if self.size == 0:
            raise ConfigurationError("Public: data is empty: nothing can be measured on it.")

    @property
    def comes_in_batches(self) -> bool:
        """Whether the batches are those that were given."""
        return self._batches is not None

    def batches(self, size: int | None = None) -> Iterator[Any]:
        """All of it, in order, in batches of `size` (by default `batch_size`) unless it came in batches."""
        if self._fetcher is None:
            assert self._batches is not None
            yield from self._batches
            return
        step = self.batch_size if size is None else size
        for first in range(0, self.size, step):
            yield self._fetcher[np.arange(first, min(first + step, self.size), dtype=np.int64)]

    def losses(self, model: nn.Module, batch: Any, device: torch.device, of: str = "example") -> Tensor:
        """One loss an example of a batch, which is brought to the model's device; of a mini-set, perhaps one number."""
        batch = map_tensors(lambda t: t.to(device), batch)
        arguments = batch if isinstance(batch, (list, tuple)) else (batch,)
        try:
            losses = self.loss(model, *arguments)
        except ClipwiseError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"Public({self.name}): loss(model, *batch) fails on the public data ({type(error).__name__}: {error}). "
                "Give data and a loss as the model is trained with."
            ) from error
        dimensions = (0, 1) if of == "mini-set" else (1,)
        if not (isinstance(losses, Tensor) and losses.dim() in dimensions and losses.requires_grad):
            listed = (
                " The list that was given is taken for batches: if it is one of records, give a data set."
            )
            raise ConfigurationError(
                "Public: loss(model, *batch) must return one loss an example, with gradients: use reduction='none'; a "
                "single number will do for norms of mini-sets, of='mini-set'."
                + (listed if isinstance(self.data, (list, tuple)) else "")
            )
        if losses.dim() and not len(losses):
            raise ConfigurationError(f"Public({self.name}): a batch holds no example: leave it out.")
        return losses

    def describe(self) -> dict[str, Any]:
        """Which data, in plain types."""
        return {"public": self.name, "batches" if self.comes_in_batches else "examples": self.size}

    def __repr__(self) -> str:
        return f"Public({self.name}, {self.size} {'batches' if self.comes_in_batches else 'examples'})"


def require_public(given: object, who: str, instead: str = "") -> Public:
    """Refuse everything that is not marked as public."""
    if isinstance(given, Public):
        return given
    what = "a mapping" if isinstance(given, Mapping) else f"a {type(given).__name__}"
    raise ConfigurationError(
        f"{who}: public must be data that is marked as public, not {what}. What is learned from it gets no noise, so "
        f"private data may not be used here. If every record of it is public, give Public(data, loss=...){instead}."
    )
