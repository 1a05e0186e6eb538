"""Changes to one record of a data set, as an adversary makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from clipwise.sampling.batch_structure import map_tensors

Change = Callable[[Any], Any]  # maps a record to another one


def _of_floats(change: Callable[[Tensor], Tensor]) -> Change:
    """Change the floating point tensors of a record; ids and labels stay."""
    return lambda record: map_tensors(lambda t: change(t) if t.is_floating_point() else t, record)


def _alternating(x: Tensor) -> Tensor:
    """One row repeated with alternating signs along the first axis, so that positions cancel."""
    if x.dim() == 0:
        return x
    signs = 1 - 2 * (torch.arange(x.shape[0], dtype=x.dtype) % 2)
    return 100 * x[:1] * signs.view(-1, *[1] * (x.dim() - 1))


# The default changes of a record: most mistakes show on one of these.
CHANGES: Mapping[str, Change] = {
    "as it is": lambda record: record,
    "outlier": _of_floats(lambda x: 1e4 * x),
    "cancelling": _of_floats(_alternating),
}


def with_record(dataset: Any, index: int, record: Any) -> Any:
    """The data set with one record replaced. A plain `TensorDataset` stays one."""
    if type(dataset) is TensorDataset:
        tensors = [t.clone() for t in dataset.tensors]
        for tensor, value in zip(tensors, record, strict=True):
            tensor[index] = value
        return TensorDataset(*tensors)
    return _Changed(dataset, {index: record})


class _Changed(Dataset[Any]):
    def __init__(self, dataset: Any, records: Mapping[int, Any]) -> None:
        self._dataset, self._records = dataset, records

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._records[index] if index in self._records else self._dataset[index]
