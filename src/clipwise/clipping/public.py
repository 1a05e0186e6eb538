"""A type that marks data as public."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clipwise.errors import ConfigurationError
from clipwise.sampling.batch_structure import arguments_of, map_tensors
from clipwise.sampling.fetch import Fetcher
from clipwise.validation.arguments import naming, whole

Loss = Callable[..., Tensor]


class PublicData:
    """Public data and its loss. The user declares that no record of it is private.

    Values computed from it get no noise and are not accounted for. The privacy statement names the data, its size and
    its use.

    Args:
        data: a map-style data set, or batches: a list, a tuple or a `DataLoader` of them.
        loss: `loss(model, *batch)` returns one loss per example, as in the training loop; it may return a single loss
            for norms of microbatches (`of="microbatch"`).
        batch_size: the number of examples per forward pass, unless `data` consists of batches.
        name: the name in the statement; by default the name of the type.
        collate_fn: turns a list of records into a batch, for a data set.
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
                "PublicData: loss must be a function loss(model, *batch) that returns one loss per example."
            )
        self.data = data
        self.loss, self.batch_size = loss, whole("PublicData: batch_size", batch_size, least=1)
        self.name = type(data).__name__ if name is None else name
        self._fetcher: Fetcher | None = None
        if isinstance(data, (list, tuple)) and any(isinstance(member, Tensor) for member in data):
            raise ConfigurationError(
                f"PublicData: data is a {type(data).__name__} of tensors, which may be columns or batches: pass "
                "TensorDataset(x, y) for columns, or a list with a tuple (x, y) for each batch."
            )
        if isinstance(data, (list, tuple, DataLoader)):
            self.size = len(data)
        else:
            if isinstance(data, (Iterator, Tensor)) or not hasattr(data, "__getitem__"):
                raise ConfigurationError(
                    f"PublicData: data is a {type(data).__name__}, which cannot be read repeatedly in batches: pass "
                    "a map-style data set, or a list of batches."
                )
            self._fetcher = Fetcher(data, collate_fn)
            self.size = self._fetcher.dataset_size
        if self.size == 0:
            raise ConfigurationError("PublicData: data is empty, so no norms can be measured.")

    @property
    def comes_in_batches(self) -> bool:
        """Whether `data` consists of batches."""
        return self._fetcher is None

    def batches(self, size: int | None = None) -> Iterator[Any]:
        """All data in order, in batches of `size` (by default `batch_size`), or in the given batches."""
        if self._fetcher is None:
            yield from self.data
            return
        step = self.batch_size if size is None else size
        for first in range(0, self.size, step):
            yield self._fetcher[np.arange(first, min(first + step, self.size), dtype=np.int64)]

    def losses(self, model: nn.Module, batch: Any, device: torch.device, of: str = "example") -> Tensor:
        """The losses of a batch, which is moved to `device`: one per example, or a single loss for a microbatch."""
        batch = map_tensors(lambda t: t.to(device), batch)
        with naming(f"PublicData({self.name})", "loss(model, *batch)"):
            losses = self.loss(model, *arguments_of(batch))
        dimensions = (0, 1) if of == "microbatch" else (1,)
        if not (isinstance(losses, Tensor) and losses.dim() in dimensions and losses.requires_grad):
            listed = " A list is interpreted as batches: if it is a list of records, pass a data set."
            raise ConfigurationError(
                "PublicData: loss(model, *batch) must return one loss per example, with gradients: use "
                "reduction='none'. A single loss is allowed for norms of microbatches, of='microbatch'."
                + (listed if isinstance(self.data, (list, tuple)) else "")
            )
        if losses.dim() and not len(losses):
            raise ConfigurationError(f"PublicData({self.name}): a batch holds no example: remove it.")
        return losses

    def describe(self) -> dict[str, Any]:
        """The name and size of the data, in JSON types."""
        return {"public": self.name, "batches" if self.comes_in_batches else "examples": self.size}

    def __repr__(self) -> str:
        return f"PublicData({self.name}, {self.size} {'batches' if self.comes_in_batches else 'examples'})"


def require_public(given: object, owner: str, instead: str = "") -> PublicData:
    """Raise if `given` is not marked as public."""
    if isinstance(given, PublicData):
        return given
    raise ConfigurationError(
        f"{owner}: public must be data that is marked as public, not a {type(given).__name__}. Values computed from it "
        "get no noise, so private data may not be used here. If every record is public, pass PublicData(data, loss=...)"
        f"{instead}."
    )
