"""The arguments of `make_private` that a `torch.utils.data.DataLoader` holds.

A private run draws its own batches. Options of the `DataLoader` that would draw them in another way are refused,
because the accounted event would not be the one that ran.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from clipwise.errors import ConfigurationError


def arguments_of(loader: Any) -> dict[str, Any]:
    """`dataset`, `batch_size` and the fetching options of a loader, as arguments of `make_private`.

    The order of the loader (`shuffle`) has no effect: each batch is drawn from the whole data set.

    Raises:
        ConfigurationError: if the loader draws its batches in a way that cannot be accounted.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"The training data must be a torch.utils.data.DataLoader, not {type(loader).__name__}: the private run "
            "takes its data set, batch size, collate_fn and workers, and draws the batches itself."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "The data loader has an IterableDataset, which has no length and cannot be sampled: use a map-style data "
            "set with __len__ and __getitem__."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            "The data loader has a batch_sampler of its own, such as one that groups records by length. Which records "
            "share a batch would depend on the data. Give batch_size instead: the private run draws the batches."
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or getattr(loader.sampler, "replacement", False):
        raise ConfigurationError(
            f"The data loader has the sampler {type(loader.sampler).__name__}, whose draws are not accounted. Remove "
            "sampler=: the private run draws the batches."
        )
    if loader.drop_last:
        raise ConfigurationError(
            "The data loader has drop_last=True. Sampled batches have no incomplete last one, and records that are "
            "dropped for their position would not be sampled as accounted. Remove drop_last."
        )
    if loader.worker_init_fn is not None:
        raise ConfigurationError(
            "The data loader has a worker_init_fn. The private run seeds its workers from its own key: remove it."
        )
    found: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": min(loader.batch_size, len(loader.dataset)),  # type: ignore[arg-type]
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
    if loader.collate_fn is not default_collate:
        found["collate_fn"] = loader.collate_fn
    if loader.num_workers and loader.prefetch_factor is not None:
        found["prefetch_factor"] = loader.prefetch_factor
    return found
