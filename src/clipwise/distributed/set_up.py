"""What must hold on all ranks before the first step: equal arguments, equal data, equal weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from clipwise.distributed.layouts import ModelLayout
from clipwise.distributed.ranks import OneRank, Ranks, digest_of
from clipwise.errors import ConfigurationError
from clipwise.validation.inventory import checksums

_COMPARED_RECORDS = 64
_DIGEST = 8  # bytes
_UNKNOWN = bytes(_DIGEST)


def require_equal_arguments(ranks: OneRank, *values: object) -> None:
    """Raise on every rank unless all of them have these values, and the versions on which draws depend."""
    if ranks.count > 1:
        ranks.exchange("set-up", check=digest_of(values, torch.__version__, np.__version__))


def require_equal_model(ranks: OneRank, model: Any) -> None:
    """Raise on every rank unless all of them have a model with the same parameters and buffers, of the same shapes."""
    if ranks.count == 1 or not isinstance(model, nn.Module):
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine = digest_of([(name, tuple(t.shape), t.dtype) for name, t in tensors]).to_bytes(8, "little")
    if len(set(ranks.exchange("set-up", mine))) > 1:
        raise ConfigurationError(
            "model does not have the same parameters on every rank. Build the same model on all of them; pipeline "
            "parallelism, in which each rank has other layers, is not supported. Use the plain model, "
            "DistributedDataParallel or fully_shard."
        )


def require_equal_data(ranks: OneRank, dataset: Any) -> None:
    """Raise if the ranks have different records, or the same in another order.

    A record that has other indices on another rank could be drawn twice in one step.
    """
    if ranks.count == 1:
        return
    notes = ranks.exchange("set-up", b"".join(_digests(dataset)))
    indices, records = ({note[start : start + _DIGEST] for note in notes} for start in (0, _DIGEST))
    if len(indices) > 1 or len(records - {_UNKNOWN}) > 1:
        raise ConfigurationError(
            "dataset is not the same on every rank. Give every rank the whole data set: one batch is drawn from all of "
            "it, and each rank gets its own records of that batch. Use no DistributedSampler and no part of the data."
        )


def make_weights_equal(layout: ModelLayout) -> None:
    """If ranks have different weights, give all of them those of rank 0, as DistributedDataParallel does."""
    ranks = layout.ranks
    if not isinstance(ranks, Ranks) or layout.is_sharded:
        return
    tensors = [t.detach() for t in (*layout.model.parameters(), *layout.model.buffers())]
    if len(set(ranks.exchange("set-up", repr(checksums(tensors).tolist()).encode()))) == 1:
        return
    for t in tensors:
        _broadcast(t, ranks)


@torch.no_grad()
def _broadcast(t: Tensor, ranks: Ranks) -> None:
    """Overwrite a tensor with that of rank 0."""
    sent = t.contiguous()
    work = dist.broadcast(sent, 0, group=ranks.group if t.device.type == "cpu" else None, async_op=True)
    if t.device.type == "cpu":
        ranks.wait(work)
    elif work is not None:
        work.wait()
    if sent is not t:
        t.copy_(sent)


def _digests(dataset: Any) -> tuple[bytes, bytes]:
    """Digests of the indices of subsets, and of some records: `_UNKNOWN` if these are random."""
    places = np.unique(np.linspace(0, len(dataset) - 1, _COMPARED_RECORDS).astype(int))
    indices = []
    while type(dataset) is Subset:
        indices.append(np.asarray(dataset.indices, dtype=np.int64))
        places, dataset = indices[-1][places], dataset.dataset
    of_indices = digest_of(*(each.tobytes() for each in indices)).to_bytes(_DIGEST, "little")
    if isinstance(dataset, TensorDataset):
        return of_indices, digest_of(*_values(dataset.tensors, places)).to_bytes(_DIGEST, "little")
    return of_indices, _of_records(dataset)


def _of_records(dataset: Any) -> bytes:
    """A digest of a few records; `_UNKNOWN` if reading them again gives other values."""
    from clipwise.engine.fingerprint import of_data

    with suppress(Exception), torch.random.fork_rng(devices=[]):  # an unreadable record is reported when it is drawn
        found = of_data(dataset)
        return found[:_DIGEST] if found == of_data(dataset) else _UNKNOWN
    return _UNKNOWN


def _values(tensors: Iterable[Tensor], places: Any) -> Iterable[object]:
    rows = torch.as_tensor(places)
    return [checksums([t[rows.to(t.device)]]).tolist() for t in tensors]
