"""Models sharded by `fully_shard` (FSDP2), with or without replicas (HSDP).

The parameters are gathered by one explicit `unshard` before a forward pass, stay unsharded until the sums of the piece
exist, and are freed before the update. So forward and backward passes contain no collective: a rank may take any number
of them, also none if it has no records. The memory for it is one copy of the parameters in the dtype of the forward
pass.

Sums are reduced to the shards that the optimizer holds: a reduce-scatter over each sharded dimension of the mesh and an
all-reduce over each replicated one. Noise is added to the shards; replicas draw the same values.

Legend: R ranks of a mesh dimension, n entries.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard

from clipwise.distributed import sums
from clipwise.distributed.dtensors import DTensorLayout, span_of
from clipwise.distributed.layouts import Parameters
from clipwise.distributed.ranks import OneRank
from clipwise.errors import ConfigurationError
from clipwise.gradients.real_views import own_part


class Sharded(DTensorLayout):
    """A model whose parameters are DTensors of `fully_shard`."""

    def __init__(self, model: nn.Module, ranks: OneRank) -> None:
        super().__init__(model, ranks)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._by_unsharded: dict[int, Tensor] = {}
        _require_fully_sharded(model, self._modules, ranks)
        self.reshard()

    def bind(self, parameters: Parameters) -> None:
        self.stored = parameters
        everything = dict(self.model.named_parameters())
        self.unshard()  # FSDP2 makes the unsharded parameters at the first call and keeps the objects
        unsharded = dict(self.model.named_parameters())
        self.used = {name: unsharded[name] for name in parameters}
        self._by_unsharded = {id(p): own_part(everything[name]) for name, p in unsharded.items()}
        self._held = unsharded  # keeps their ids from being reused
        self.reshard()
        self._spans = {name: span_of(p) for name, p in parameters.items() if isinstance(p, DTensor)}

    def unshard(self) -> None:
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()
            # An evaluation must not leave unsharded weights behind: they would be out of date after the next update.
            module.set_reshard_after_forward(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        self.unshard()
        try:
            yield
        finally:
            self.reshard()

    def stored_tensor(self, t: Tensor) -> Tensor:
        return self._by_unsharded.get(id(t), t) if not isinstance(t, DTensor) else own_part(t)

    @torch.no_grad()
    def reduced(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each sum: the shard of this rank for parameters, all of it for other parts."""
        others = {name: t for name, t in total.items() if name not in self._spans}
        found: dict[str, Tensor] = {}

        def reduction(bucket: Sequence[str]) -> Iterator[None]:
            shards = [total.pop(name) for name in bucket]
            shards = [t.to(sums.wide(t.dtype)) for t in shards]
            mesh, placements = _where(self.stored[bucket[0]])
            for number, placement in enumerate(placements):
                group, size = mesh.get_group(number), mesh.size(number)
                if isinstance(placement, Shard):
                    rank = mesh.get_local_rank(number)
                    shards = yield from self._scattered(shards, placement.dim, group, size, rank)
                elif size > 1:
                    shards = yield from self._all_reduced(shards, group)
            found.update(zip(bucket, shards, strict=True))

        sums.overlapped(reduction(bucket) for bucket in self._buckets(total))
        return found | (super().reduced(others) if others else {})

    def require_whole_weights(self, reader: str) -> None:
        if reader:
            raise ConfigurationError(
                f"{reader} is not supported for a model sharded by fully_shard: it needs the whole weights outside of "
                "forward passes. Remove it, or use the plain model or DistributedDataParallel."
            )

    def _buckets(self, total: Mapping[str, Tensor]) -> list[list[str]]:
        """Names of parameters whose sums are reduced together: of one mesh, placement and dtype."""
        found: list[list[str]] = []
        kind, size = None, 0
        for name in self._spans:
            p, t = self.stored[name], total[name]
            here = (*_where(p), sums.wide(t.dtype), t.device)
            if here != kind or size + t.numel() > sums.BUCKET:
                found.append([])
                kind, size = here, 0
            found[-1].append(name)
            size += t.numel()
        return found

    def _scattered(
        self, whole: list[Tensor], dim: int, group: dist.ProcessGroup, size: int, rank: int
    ) -> Generator[None, None, list[Tensor]]:
        """The shard of this rank of each sum over a mesh dimension. Shards are padded to equal lengths."""
        if size == 1:
            return whole
        chunks = [torch.chunk(t, size, dim) for t in whole]
        lengths = [max(c.numel() for c in each) for each in chunks]
        packed_Rn = whole[0].new_zeros(size, sum(lengths))
        for r in range(size):
            start = 0
            for each, length in zip(chunks, lengths, strict=True):
                if r < len(each):  # torch.chunk returns fewer chunks for a short dimension
                    packed_Rn[r, start : start + each[r].numel()] = each[r].reshape(-1)
                start += length
        mine_n = packed_Rn.new_empty(sum(lengths))
        yield from self._reduce_scatter(mine_n, packed_Rn, group, rank)
        found, start = [], 0
        for t, each, length in zip(whole, chunks, lengths, strict=True):
            shape = list(each[rank].shape) if rank < len(each) else [*t.shape[:dim], 0, *t.shape[dim + 1 :]]
            numel = each[rank].numel() if rank < len(each) else 0
            found.append(mine_n[start : start + numel].view(shape))
            start += length
        return found

    def _reduce_scatter(self, mine_n: Tensor, packed_Rn: Tensor, group: dist.ProcessGroup, rank: int) -> Iterator[None]:
        if torch.are_deterministic_algorithms_enabled():
            every = [torch.empty_like(packed_Rn) for _ in range(len(packed_Rn))]
            work = dist.all_gather(every, packed_Rn, group=group, async_op=True)
            yield
            self._wait(work, packed_Rn)
            mine_n.copy_(every[0][rank])
            for term in every[1:]:
                mine_n += term[rank]
            return
        # Its name before torch 2.13, which warns about that name.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = reduce_scatter(mine_n, packed_Rn.view(-1), group=group, async_op=True)
        yield
        self._wait(work, packed_Rn, is_lazy=True)  # gloo's is

    def _all_reduced(self, shards: list[Tensor], group: dist.ProcessGroup) -> Generator[None, None, list[Tensor]]:
        flat = torch.cat([t.reshape(-1) for t in shards])
        work = dist.all_reduce(flat, group=group, async_op=True)
        yield
        self._wait(work, flat)
        pieces = torch.split(flat, [t.numel() for t in shards])
        return [piece.view(t.shape) for piece, t in zip(pieces, shards, strict=True)]


def _where(p: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    assert isinstance(p, DTensor)
    return p.device_mesh, tuple(p.placements)


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether a part of the model at least was sharded by `fully_shard`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _require_fully_sharded(model: nn.Module, modules: Sequence[FSDPModule], ranks: OneRank) -> None:
    if not modules:
        raise ConfigurationError(
            "The model has DTensor parameters and is not sharded by fully_shard, and there is one rank: tensor "
            "parallelism (parallelize_module) needs several ranks. Use the plain model or fully_shard."
        )
    if not isinstance(model, FSDPModule):
        raise ConfigurationError(
            "fully_shard was called on parts of the model only: call fully_shard(model) last, on the whole model, so "
            "that every parameter is sharded over the same ranks, and torch.compile(model) after it."
        )
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            continue
        sharded = [placement for placement in p.placements if isinstance(placement, Shard)]
        names = p.device_mesh.mesh_dim_names or ()
        if len(sharded) > 1 or "tp" in names:
            raise ConfigurationError(
                f"Parameter {name!r} is sharded over {len(sharded)} dimensions of its mesh {names}: tensor parallelism "
                "(parallelize_module) together with fully_shard is not supported. Use one of them."
            )
        if p.device_mesh.size() != ranks.count:
            raise ConfigurationError(
                f"Parameter {name!r} is on a mesh of {p.device_mesh.size()} ranks, and torch.distributed has "
                f"{ranks.count}: shard the model over all ranks (a mesh with replicas is possible: HSDP)."
            )
        if p.is_complex():
            raise ConfigurationError(f"Parameter {name!r} is complex, which is not supported for a sharded model.")
