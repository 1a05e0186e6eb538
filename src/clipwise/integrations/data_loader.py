"""The arguments of `make_private` that a `torch.utils.data.DataLoader` holds.

A private run draws its own batches. Options of the `DataLoader` that would draw them in another way are refused,
because the accounted event would not be the one that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from clipwise.engine.private import Private
from clipwise.errors import ConfigurationError
from clipwise.sampling.schemes import make_scheme


def arguments_of(loader: Any) -> dict[str, Any]:
    """`dataset`, `batch_size` and the fetching options of a loader, as arguments of `make_private`.

    The order of the loader (`shuffle`) has no effect: each batch is drawn from the whole data set.

    Raises:
        ConfigurationError: if the loader draws its batches in a way that cannot be accounted.
    """
    if isinstance(getattr(loader, "private", None), Private):
        raise ConfigurationError(
            "The data loader is that of a private run already, as when a cell of a notebook is executed twice. "
            "Continue with it, or make the model, the optimizer and the DataLoader again and give those."
        )
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
    require_separate_records(loader.collate_fn)
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


def with_options(arguments: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loader and those of the user, which come first."""
    if options.get("sample_rate") is not None or options.get("sampling") == "full":
        arguments = {name: value for name, value in arguments.items() if name != "batch_size"}
    return {**arguments, **options}


def steps_per_epoch(arguments: Mapping[str, Any]) -> int:
    """The steps in an epoch of a run with these arguments of `make_private`, before it is made."""
    if "group" in arguments:
        raise ConfigurationError(
            "group= is not supported by this adapter, which protects records: call clipwise.make_private(..., group=) "
            "with Batch(max_norm=...) in a loop of your own."
        )
    names = ("batch_size", "sample_rate", "max_batch_size")
    given = {name: arguments[name] for name in names if name in arguments}
    return make_scheme(arguments.get("sampling", "poisson"), len(arguments["dataset"]), **given).steps_per_epoch


def holds_records_of(trained: object, evaluated: object) -> bool:
    """Whether an evaluation is on the data set of the training, on a `Subset` of it, or on the whole of it."""
    if trained is None or evaluated is None:
        return False
    return any(part is trained for part in _wholes(evaluated)) or any(part is evaluated for part in _wholes(trained))


def _wholes(dataset: object) -> Iterator[object]:
    """A data set, and those that it is a `Subset` of."""
    yield dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
        yield dataset


def require_separate_records(collator: Any) -> None:
    """Raise for a collator that joins (packs) the records of a batch in one row, as some of transformers and TRL do."""
    name = type(collator).__name__
    if getattr(collator, "padding_free", False) or name == "DataCollatorWithFlattening":
        raise ConfigurationError(
            f"The data collator {name} joins (packs) the records of a batch in one row, so they have no losses of "
            "their own: use a collator that pads, such as DataCollatorWithPadding."
        )
