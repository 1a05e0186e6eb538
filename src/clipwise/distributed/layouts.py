"""How a model is divided among the ranks, and which layouts are refused.

clipwise takes gradients from the autograd graph. Parameters get no `.grad` in the backward pass, so neither DDP's
reducer nor FSDP2's reduce-scatter runs. The layout reduces the clipped sums instead, after the clip and before the
noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from clipwise.clipping import Strategy
from clipwise.distributed import sums
from clipwise.distributed.ranks import OneRank, Ranks
from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Part

Parameters = Mapping[str, nn.Parameter]


class ModelLayout:
    """A model of which every rank has all parameters; also the layout of a single process.

    Attributes:
        model: the model, without a wrapper such as DistributedDataParallel.
        stored: the trainable parameters that the optimizer holds.
        used: the trainable parameters that a forward pass uses. They are the leaves of the autograd graph.
        is_sharded: whether a rank stores only a part of some parameters.
        splits_gradients: whether a rank computes only a part of the gradients of its examples (tensor parallelism).
        share: which share of each batch this rank takes, and the number of shares.
    """

    is_sharded = False
    splits_gradients = False

    def __init__(self, model: nn.Module, ranks: OneRank) -> None:
        self.model, self.ranks = model, ranks
        self.stored: Parameters = {}
        self.used: Parameters = {}
        self.share = ranks.rank, ranks.count

    def bind(self, parameters: Parameters) -> None:
        """Take the trainable parameters of the model."""
        self.stored = self.used = parameters

    def unshard(self) -> None:
        """Make all parameters available for forward and backward passes on this rank, with any number of passes."""

    def reshard(self) -> None:
        """Free what `unshard` allocated. Parameters are then those that the optimizer holds."""

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """A block in which `used` holds the current weights."""
        yield

    def require_strategy(self, strategy: Strategy, largest_piece: int | None, has_loss: bool) -> None:
        """Raise if the layout does not support the strategy, this `max_physical_batch_size`, or `loss`."""

    def require_piece(self, size: int) -> None:
        """Raise if the layout does not support a piece with so many records."""

    def joined_squares(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """The squared norms of whole gradients, from those of the parts on each rank, if `splits_gradients`."""
        raise NotImplementedError

    def stored_tensor(self, t: Tensor) -> Tensor:
        """The tensor of this rank that holds the values of a parameter or buffer of the model."""
        return t

    def reduced(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each sum. Overwrites the dictionary."""
        return sums.summed(total, self.ranks) if isinstance(self.ranks, Ranks) else total

    def noised(
        self, total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey
    ) -> dict[str, Tensor]:
        """`mechanism.noised_sums` for the shards of this rank. Replicas draw the same noise."""
        raise NotImplementedError

    def write(self, gradients: Mapping[str, Tensor]) -> None:
        """`mechanism.write_gradients` for shards."""
        raise NotImplementedError

    def whole_release(self, released: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """The released values with every entry of each parameter."""
        return released

    def own_part(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part of this rank of gradients with every entry."""
        return gradients

    def require_whole_weights(self, reader: str) -> None:
        """Raise if `reader` is not "" and no rank has the whole weights after an update."""

    def whole_state(self) -> dict[str, Any]:
        """The `state_dict` of the model with every entry, on the CPU if the model is sharded."""
        return self.model.state_dict()


def layout_of(model: Any, optimizer: torch.optim.Optimizer, ranks: OneRank) -> ModelLayout:
    """The layout of a model. Raises for layouts that are not supported."""
    if not isinstance(model, nn.Module):  # `trainable_parameters` raises for it
        return ModelLayout(model, ranks)
    inner = _unwrapped(model)
    _require_supported(inner, optimizer)
    if _has_dtensors(inner):
        # These import torch.distributed.tensor, which takes long.
        from clipwise.distributed.sharded import Sharded, is_fully_sharded

        if is_fully_sharded(inner) or not isinstance(ranks, Ranks):
            return Sharded(inner, ranks)
        from clipwise.distributed.tensor_parallel import TensorParallel

        return TensorParallel(inner, ranks)
    return ModelLayout(inner, ranks)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return model
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        raise ConfigurationError(
            "The model is in DistributedDataParallel, which would broadcast its buffers in every forward pass; a rank "
            "without records takes no forward pass, and the others would wait for it. Build it with "
            "DistributedDataParallel(..., forward_sync_buffers=False) (broadcast_buffers=False before torch 2.13), or "
            "give make_private the model itself: clipwise reduces the gradients and needs no wrapper."
        )
    return cast(nn.Module, model.module)


def _has_dtensors(model: nn.Module) -> bool:
    return any(hasattr(p, "device_mesh") for p in model.parameters())


def _require_supported(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for wrappers that move gradients or parameters by themselves."""
    advice = (
        "is not supported. Use the plain model or DistributedDataParallel, or shard it with "
        "torch.distributed.fsdp.fully_shard (FSDP2)."
    )
    for kind in (*(type(m) for m in model.modules()), type(optimizer)):
        for base in kind.__mro__:
            package = base.__module__.partition(".")[0]
            if package == "deepspeed" or base.__name__ == "DeepSpeedEngine":
                raise ConfigurationError(f"DeepSpeed ({kind.__name__}) {advice}")
            if base.__module__.startswith("torch.distributed.pipelining"):
                raise ConfigurationError(f"Pipeline parallelism (torch.distributed.pipelining) {advice}")
            if base.__name__ == "FullyShardedDataParallel" and base.__module__.startswith("torch.distributed.fsdp"):
                raise ConfigurationError(f"FSDP1 (FullyShardedDataParallel) {advice}")
            if base.__name__ == "ZeroRedundancyOptimizer":
                raise ConfigurationError(f"ZeroRedundancyOptimizer {advice}")
            if issubclass(kind, nn.Module) and base is nn.DataParallel:
                raise ConfigurationError(f"torch.nn.DataParallel {advice}")
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ConfigurationError(f"DeepSpeed (ZeRO stage 3) {advice}")
