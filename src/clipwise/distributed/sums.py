"""The sum of clipped sums over ranks, in buckets.

Every rank clips its own examples; the sum over ranks is the clipped sum of the batch. It is never a mean: the only
divisor is the public constant of the release. Sums are reduced in float32 or better.

With `torch.use_deterministic_algorithms(True)` terms are added in the order of the ranks, whatever the backend does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from clipwise.distributed.ranks import Ranks

BUCKET = 8 * 2**20  # entries of one collective


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this dtype are added: float32 or better."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def buckets(sums: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive sums of one dtype and device, with about `BUCKET` entries together."""
    found: list[list[Tensor]] = []
    size = 0
    for t in sums:
        is_same = bool(found) and (t.dtype, t.device) == (found[-1][0].dtype, found[-1][0].device)
        if not is_same or size + t.numel() > BUCKET:
            found.append([])
            size = 0
        found[-1].append(t)
        size += t.numel()
    return found


@torch.no_grad()
def summed(sums: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The sum of each entry over all ranks, on every rank. Complex sums are added as pairs of real numbers."""
    names = sorted(sums)
    are_complex = {name for name in names if sums[name].is_complex()}
    real = {name: torch.view_as_real(sums[name]) if name in are_complex else sums[name] for name in names}
    wide_sums = [real[name].to(wide(real[name].dtype)) for name in names]
    running = []
    for bucket in buckets(wide_sums):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        running.append((bucket, flat, _start(flat, ranks)))
    found: list[Tensor] = []
    for bucket, flat, work in running:
        _finish(flat, work, ranks)
        pieces = torch.split(flat, [t.numel() for t in bucket])
        found.extend(piece.view(t.shape) for piece, t in zip(pieces, bucket, strict=True))
    total = dict(zip(names, found, strict=True))
    return {name: torch.view_as_complex(total[name]) if name in are_complex else total[name] for name in sums}


def _group(t: Tensor, ranks: Ranks) -> dist.ProcessGroup | None:
    """The run's own group on the CPU; on a device torch's default group, whose backend belongs to that device."""
    return ranks.group if t.device.type == "cpu" else None


def _start(flat: Tensor, ranks: Ranks) -> tuple[dist.Work | None, list[Tensor]]:
    if not torch.are_deterministic_algorithms_enabled():
        return dist.all_reduce(flat, group=_group(flat, ranks), async_op=True), []
    every = [torch.empty_like(flat) for _ in range(ranks.count)]
    return dist.all_gather(every, flat, group=_group(flat, ranks), async_op=True), every


def _finish(flat: Tensor, started: tuple[dist.Work | None, list[Tensor]], ranks: Ranks) -> None:
    work, every = started
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
