"""Parameters that are DTensors: what `fully_shard` and `parallelize_module` layouts have in common.

Noise is added to the part of a parameter that is on this rank. A rank draws the values of its part from the stream of
the whole parameter, so every entry gets noise once, the same as in a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from clipwise.distributed import sums
from clipwise.distributed.layouts import ModelLayout, Parameters
from clipwise.distributed.ranks import Ranks
from clipwise.distributed.shard_noise import Span, noised_shards
from clipwise.errors import ConfigurationError
from clipwise.gradients.real_views import own_part
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Part


class DTensorLayout(ModelLayout):
    """A model with parameters that are DTensors, of which a rank stores a part."""

    is_sharded = True
    _spans: dict[str, Span]  # of the parameters of which a rank stores a part

    def noised(
        self, total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey
    ) -> dict[str, Tensor]:
        return noised_shards(total, self._spans, parts, divisor, key)

    def whole_release(self, released: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return _Gathered(released, self.stored)

    def own_part(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if isinstance(gradients, _Gathered):
            return gradients.shards
        spans = self._spans
        return {n: spans[n].of(g.detach()) if n in spans else g for n, g in gradients.items()}

    @torch.no_grad()
    def write(self, gradients: Mapping[str, Tensor]) -> None:
        for name, p in self.stored.items():
            local = gradients[name].to(device=own_part(p).device, dtype=p.dtype).contiguous()
            p.grad = _distributed(local, p) if isinstance(p, DTensor) else local

    def whole_state(self) -> dict[str, Any]:
        """All ranks take part; each tensor is moved to the CPU before the next is gathered."""
        self.reshard()
        state = self.model.state_dict()
        return {name: t.full_tensor().cpu() if isinstance(t, DTensor) else t for name, t in state.items()}

    def _wait(self, work: dist.Work | None, t: Tensor, is_lazy: bool = False) -> None:
        if isinstance(self.ranks, Ranks):
            sums.wait(work, t, self.ranks, is_lazy)
        elif work is not None:
            work.wait()


class _Gathered(Mapping[str, Tensor]):
    """Released values in which a shard is gathered when it is read. All ranks read the same names."""

    def __init__(self, shards: dict[str, Tensor], stored: Parameters) -> None:
        self.shards, self._stored = shards, stored

    def __getitem__(self, name: str) -> Tensor:
        p = self._stored.get(name)
        return _distributed(self.shards[name], p).full_tensor() if isinstance(p, DTensor) else self.shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def _distributed(local: Tensor, p: DTensor) -> DTensor:
    """A DTensor like `p` with this part."""
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def span_of(p: DTensor) -> Span:
    """Which entries of a parameter are on this rank."""
    ranks = p.device_mesh.mesh
    if any(bool((ranks.diff(dim=dim) <= 0).any()) for dim in range(ranks.dim())):
        raise ConfigurationError(
            "The device mesh has its ranks in another order than torch.distributed, so collectives would exchange "
            "shards: make it by init_device_mesh(...), or with ranks that rise along each of its dimensions."
        )
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    dims = {placement.dim for placement in p.placements if isinstance(placement, Shard)}
    dim = dims.pop() if dims else 0
    return Span(tuple(p.shape), dim, offset[dim] if shape[dim] else 0, shape[dim])
