"""The sum of clipped sums over ranks, in buckets.

Every rank clips its own examples; the sum over ranks is the clipped sum of the batch. It is never a mean: the only
divisor is the public constant of the release. Sums are reduced in float32 or better.

A few buckets are reduced at once. While one is on its way the next is packed, and their copies are all the memory that
a reduction takes beside the sums.

With `torch.use_deterministic_algorithms(True)` terms are added in the order of the ranks, whatever the backend does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from clipwise.distributed.ranks import Ranks
from clipwise.gradients.real_views import complex_view, real_view

BUCKET = 8 * 2**20  # entries of one collective
_AT_ONCE = 4  # buckets


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this dtype are added: float32 or better."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def buckets(total: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of consecutive sums of one dtype and device, with about `BUCKET` entries together."""
    found: list[list[str]] = []
    kind, size = None, 0
    for name in sorted(total):
        t = real_view(total[name])
        if kind != (t.dtype, t.device) or size + t.numel() > BUCKET:
            found.append([])
            kind, size = (t.dtype, t.device), 0
        found[-1].append(name)
        size += t.numel()
    return found


def overlapped(reductions: Iterable[Iterator[None]]) -> None:
    """Run reductions, a few at once. Each yields after it has started a collective, and waits for it when resumed."""
    running: deque[Iterator[None]] = deque()
    for reduction in reductions:
        next(reduction, None)
        running.append(reduction)
        if len(running) == _AT_ONCE:
            deque(running.popleft(), maxlen=0)  # to its end
    for reduction in running:
        deque(reduction, maxlen=0)


@torch.no_grad()
def summed(total: dict[str, Tensor], ranks: Ranks, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The sum of each entry over all ranks, or those of a group, on each of them. Overwrites the dictionary.

    Complex sums are added as pairs of real numbers.
    """
    found: dict[str, Tensor] = {}

    def reduction(bucket: Sequence[str]) -> Iterator[None]:
        sums = [real_view(total[name]) for name in bucket]
        are_complex = [total.pop(name).is_complex() for name in bucket]
        flat = torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in sums])
        work, every = _start(flat, ranks, group)
        yield
        _finish(flat, work, every, ranks)
        pieces = torch.split(flat, [t.numel() for t in sums])
        for name, t, piece, is_complex in zip(bucket, sums, pieces, are_complex, strict=True):
            found[name] = complex_view(piece.view(t.shape)) if is_complex else piece.view(t.shape)

    names = list(total)
    overlapped(reduction(bucket) for bucket in buckets(total))
    return {name: found[name] for name in names}


def new_group(members: Sequence[int], device: str, ranks: Ranks) -> dist.ProcessGroup:
    """A group of some ranks for sums on a device. All ranks call it for each group, in the same order."""
    options: dict[str, Any] = {"backend": "gloo", "timeout": ranks.group_timeout} if device == "cpu" else {}
    return cast(dist.ProcessGroup, dist.new_group(list(members), **options))


def _group(t: Tensor, ranks: Ranks) -> dist.ProcessGroup | None:
    """The run's own group on the CPU; on a device torch's default group, whose backend belongs to that device."""
    return ranks.group if t.device.type == "cpu" else None


def _start(flat: Tensor, ranks: Ranks, group: dist.ProcessGroup | None) -> tuple[dist.Work | None, list[Tensor]]:
    group = group or _group(flat, ranks)
    if not torch.are_deterministic_algorithms_enabled():
        return dist.all_reduce(flat, group=group, async_op=True), []
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    return dist.all_gather(every, flat, group=group, async_op=True), every


def _finish(flat: Tensor, work: dist.Work | None, every: list[Tensor], ranks: Ranks) -> None:
    wait(work, flat, ranks)
    if every:
        flat.copy_(every[0])
        for term in every[1:]:
            flat += term


def wait(work: dist.Work | None, t: Tensor, ranks: Ranks, is_lazy: bool = False) -> None:
    """Wait for a collective: on a device in its stream, on the CPU with the run's timeout."""
    if work is None:
        return
    if t.device.type == "cpu":
        ranks.wait(work, is_lazy)
    else:
        work.wait()
