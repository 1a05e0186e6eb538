"""A short private run of any model, and data sets with one record changed as an adversary would, for audits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from clipwise.clipping import Strategy, default_for
from clipwise.engine.make_private import make_private
from clipwise.errors import ConfigurationError
from clipwise.sampling.batch_structure import arguments_of, map_tensors, tensors_in

STEPS = 6


def run_of(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    clipping: Strategy | None = None,
    step: Callable[..., bool] | None = None,
    **options: Any,
) -> tuple[Callable[[Any], None], Any]:
    """A function that trains a copy of the model on a data set, and the batch as such a data set.

    Args:
        model: is copied before each run.
        loss: `loss(model, *batch)` returns one loss per example, or `loss(model, batch)` for a mapping.
        batch: tensors with the examples along their first dimension, in a tuple, list or mapping.
        clipping: the strategy; `PerExample(max_norm=1.0)` by default, `Backprop()` for a model that is clipped for it.
        step: `step(private, model, *batch)`, for a strategy that needs more than losses. It returns the result of
            `private.step`, which is called by default.
        options: further arguments of `make_private`.
    """
    columns = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [t for t in columns if isinstance(t, Tensor) and t.dim()]
    if len(tensors) < len(batch) or len({len(t) for t in tensors}) != 1 or len(tensors[0]) < 4:
        raise ConfigurationError(
            "batch must hold tensors with the same examples, at least 4, along their first dimension, to make "
            "neighbouring data sets: otherwise write a function for clipwise.audit.neighbours."
        )

    def train(dataset: Any) -> None:
        own = copy.deepcopy(model)
        trained = [p for p in own.parameters() if p.requires_grad]
        chosen = {"sample_rate": 0.5, "noise_multiplier": 1.0, "steps": STEPS} | options
        private = make_private(
            own,
            torch.optim.SGD(trained, lr=0.01),
            dataset,
            clipping=default_for(model) if clipping is None else clipping,
            **chosen,
        )
        left = int(chosen["steps"])
        while left:
            for rows in private.loader.pieces():
                taken = (own, *arguments_of(rows))
                if step is not None:
                    left -= step(private, *taken)
                else:
                    is_empty = next((len(t) for t in tensors_in(rows) if t.dim()), 0) == 0
                    left -= private.step(None if is_empty else loss(*taken))
                if not left:
                    break

    if isinstance(batch, Mapping):
        return train, [dict(zip(batch, row, strict=True)) for row in zip(*tensors, strict=True)]
    return train, TensorDataset(*tensors)


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
