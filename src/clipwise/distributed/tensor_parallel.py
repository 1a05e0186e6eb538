"""Models split by `parallelize_module` (tensor parallelism), on all ranks or in several replicas.

The ranks of a group share the parameters of one replica and get the same records. Forward and backward passes are
torch's own: DTensor adds its collectives. A pass holds one record, so its gradient is that of the record, whatever the
layers do, and no rule has to read the graph. Each rank keeps its part of that gradient:

- of a parameter that is sharded over the group, the entries of its shard;
- of every other parameter, a copy. Copies may differ by rounding, so only that of the first rank of the group counts.

The squared norm of a record is the sum over the group of these parts, which together are what is released. So the bound
holds for the released sum even if the gradients were not those of one model on all ranks.

Shards are summed over the ranks that hold the same ones in other replicas. Everything else is summed over all ranks,
with the copies that do not count set to 0, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from clipwise.clipping import Strategy
from clipwise.distributed import sums
from clipwise.distributed.dtensors import DTensorLayout, span_of
from clipwise.distributed.layouts import Parameters
from clipwise.distributed.ranks import Ranks
from clipwise.errors import ConfigurationError, StepError
from clipwise.gradients.real_views import own_part
from clipwise.validation.inventory import checksums


class TensorParallel(DTensorLayout):
    """A model whose parameters are DTensors of `parallelize_module` on a mesh with one dimension."""

    splits_gradients = True
    ranks: Ranks

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        self._mesh = _mesh_of(model)
        self._group = self._mesh.get_group()
        members = repr(dist.get_process_group_ranks(self._group)).encode()
        groups = sorted({tuple(map(int, note.decode()[1:-1].split(","))) for note in ranks.exchange("set-up", members)})
        if sorted(rank for group in groups for rank in group) != list(range(ranks.count)):
            raise ConfigurationError(
                "The meshes of parallelize_module do not divide the ranks of torch.distributed into groups: use one "
                "dimension of a mesh of all ranks, such as init_device_mesh(..., (replicas, n))['tp']."
            )
        replica = next(number for number, group in enumerate(groups) if ranks.rank in group)
        self._counts = groups[replica][0] == ranks.rank  # whether this rank's copies count
        self.share = replica, len(groups)
        self._replicas = self._groups_of_same_shards(groups)

    def bind(self, parameters: Parameters) -> None:
        self.stored = self.used = parameters
        self._spans = {name: span_of(p) for name, p in parameters.items() if isinstance(p, DTensor) and is_split(p)}
        self._require_equal_weights()

    def require_strategy(self, strategy: Strategy, largest_piece: int | None, has_loss: bool) -> None:
        if not strategy.takes_split_gradients:
            raise ConfigurationError(
                f"clipping={type(strategy).__name__} with these options is not supported with tensor parallelism "
                "(parallelize_module). Use PerExample without sparse, running_statistics and a policy as parts, or "
                "shard the model by fully_shard."
            )
        if largest_piece != 1:
            raise ConfigurationError(
                "Tensor parallelism (parallelize_module) needs one record in each forward pass: give "
                "make_private(..., max_physical_batch_size=1) and loop over private.loader.pieces(). The batch may "
                "have any size."
            )
        if has_loss:
            raise ConfigurationError(
                "loss= is not supported with tensor parallelism (parallelize_module): leave it out. A forward pass "
                "has one record, and the replacement test needs several."
            )

    def require_piece(self, size: int) -> None:
        if size > 1:
            raise StepError(
                "A piece has several records, and tensor parallelism needs one record in each forward pass: call "
                "private.loader.pieces() without a size."
            )

    @torch.no_grad()
    def joined_squares(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack([t if self._is_counted(name) else torch.zeros_like(t) for name, t in squares.items()])
        self._wait(dist.all_reduce(stacked, group=self._group, async_op=True), stacked)
        return dict(zip(squares, stacked.unbind(), strict=True))

    def stored_tensor(self, t: Tensor) -> Tensor:
        return own_part(t)

    @torch.no_grad()
    def reduced(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        shards = {name: t for name, t in total.items() if name in self._spans}
        copies = {n: t if self._counts else torch.zeros_like(t) for n, t in total.items() if n not in self._spans}
        found = sums.summed(copies, self.ranks)
        return found | (shards if self._replicas is None else sums.summed(shards, self.ranks, self._replicas))

    def require_whole_weights(self, reader: str) -> None:
        if reader:
            raise ConfigurationError(
                f"{reader} is not supported with tensor parallelism (parallelize_module): it needs the whole weights "
                "outside of forward passes. Remove it, or use the plain model or DistributedDataParallel."
            )

    def _is_counted(self, name: str) -> bool:
        return self._counts or name in self._spans

    def _groups_of_same_shards(self, groups: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """The group of the ranks with the same shards as this one; None if there is one replica."""
        if len(groups) == 1:
            return None
        own = None
        for members in zip(*groups, strict=True):
            group = sums.new_group(members, self._mesh.device_type, self.ranks)  # all ranks make all groups
            own = group if self.ranks.rank in members else own
        return own

    def _require_equal_weights(self) -> None:
        """Raise unless copies are equal on all ranks, and shards in all replicas."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        copies = _digest(t for t in tensors.values() if not is_split(t))
        shards = _digest(t for t in tensors.values() if is_split(t))
        notes = [note.split(b"|") for note in self.ranks.exchange("set-up", b"|".join((copies, shards)))]
        same = dist.get_process_group_ranks(self._replicas) if self._replicas else [self.ranks.rank]
        differs = len({note[0] for note in notes}) > 1 or len({notes[rank][1] for rank in same}) > 1
        if any(note == b"1" for note in self.ranks.exchange("set-up", b"1" if differs else b"0")):
            raise ConfigurationError(
                "The weights are not the same on all ranks. Build the model after torch.manual_seed(...) with one seed "
                "on every rank, or load the same weights on all of them, before parallelize_module."
            )


def is_split(t: Tensor) -> bool:
    """Whether this rank has a part of a tensor only."""
    return isinstance(t, DTensor) and any(isinstance(placement, Shard) for placement in t.placements)


def _digest(tensors: Iterable[Tensor]) -> bytes:
    return repr(checksums([own_part(t.detach()) for t in tensors]).tolist()).encode()


def _mesh_of(model: nn.Module) -> DeviceMesh:
    """The one mesh of all DTensors of a model. Raises for layouts that are not supported."""
    found: dict[DeviceMesh, str] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(t, DTensor):
            continue
        found.setdefault(t.device_mesh, name)
        mesh, placements = t.device_mesh, t.placements
        is_plain = all(type(placement) in (Shard, Replicate) for placement in placements)
        if mesh.ndim != 1 or len(found) > 1 or not is_plain or t.is_complex():
            raise ConfigurationError(
                f"Parameter {name!r} is laid out as {placements} on a mesh with {mesh.ndim} dimension(s), which is not "
                "supported. Tensor parallelism (parallelize_module) needs real parameters, with Shard or Replicate on "
                "the same mesh dimension for all layers."
            )
    return next(iter(found))
