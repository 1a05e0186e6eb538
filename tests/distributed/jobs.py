"""Private runs that ranks train; the same functions train in a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipwise
from clipwise import Batch, Lipschitz, PerExample, Private, lipschitz, make_private
from clipwise.layers.bounded import ClipInput
from clipwise.layers.clipped import clip_inputs
from clipwise.layers.replace_batchnorm import replace_batchnorm

FEATURES, CLASSES = 5, 3


def data(size: int = 40) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(size, FEATURES, generator=random) * 2, torch.randint(0, CLASSES, (size,), generator=random)
    )


def network(seed: int = 0) -> nn.Sequential:
    """Widths that no number of ranks divides, so that shards are uneven and some are empty."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Tanh()),
            nn.Linear(6, CLASSES),
        )  # fmt: skip


class Checkpointed(nn.Sequential):
    """Its activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_network() -> nn.Module:
    model = network()
    model[2] = Checkpointed(*model[2])
    return model


def laid_out(model: nn.Module, layout: str) -> nn.Module:
    """The model as a user would prepare it for several ranks."""
    if layout == "plain":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    if layout == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"2.0": ColwiseParallel(output_layouts=Replicate())})
    options: dict[str, Any] = {}
    if layout == "hsdp":
        options["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
        )
    if layout == "fsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout == "fsdp-offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for child in model.children():
        if isinstance(child, nn.Sequential):
            fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def needs(layout: str) -> dict[str, Any]:
    """The arguments of `make_private` that a layout needs."""
    return {"max_physical_batch_size": 1} if layout == "tensor" else {}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter with all of its entries."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone().float()
        for name, p in inner.named_parameters()
    }


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


LIPSCHITZ_LOSS = lipschitz.SoftmaxCrossEntropy(1.0)


def train(model: nn.Module, private: Private, steps: int, is_lipschitz: bool = False) -> None:
    while steps > 0:
        for batch in private.loader.pieces():
            if not len(batch[0]):
                steps -= private.step(None)
            elif is_lipschitz:
                outputs = model(batch[0])
                steps -= private.step(LIPSCHITZ_LOSS(outputs, batch[1]), outputs=outputs)
            else:
                steps -= private.step(losses_of(model, batch))
            if steps == 0:
                return


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "per-example": lambda: PerExample(max_norm=1.0),
    "per-layer": lambda: PerExample(max_norm=1.0, parts="layer"),
    "quantile": lambda: PerExample(max_norm=clipwise.Quantile(count_noise=0.5)),
    "reweight": lambda: PerExample(max_norm=1.0, method="reweight"),
    "batch": lambda: Batch(max_norm=1.0, microbatches=4),
    "backprop": lambda: clipwise.Backprop(),
    "public": lambda: PerExample(max_norm=1.0),
    "checkpointed": lambda: PerExample(max_norm=1.0),
    "users": lambda: Batch(max_norm=1.0),
    "lipschitz": lambda: Lipschitz(max_weight_norm=1.0, input_norm=3.0, loss=LIPSCHITZ_LOSS),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "backprop": lambda: clip_inputs(network(), input_norm=1.0),
    "lipschitz": lambda: bounded_network(),
    "public": lambda: public_network(),
    "checkpointed": lambda: checkpointed_network(),
}


def bounded_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(ClipInput(3.0), nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def public_network() -> nn.Module:
    """Batch normalization with the statistics of public rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES))
        replaced, _ = replace_batchnorm(model, torch.randn(12, FEATURES), "public-exact")
    return replaced


def trained(
    rank: int,
    layout: str = "plain",
    strategy: str = "per-example",
    steps: int = 4,
    optimizer: str = "sgd",
    size: int = 40,
    torch_seed: int | None = 7,
    **options: Any,
) -> dict[str, Any]:
    """Train a few steps; returns parameters, statement and other results of this rank."""
    if torch_seed is not None:
        torch.manual_seed(torch_seed)  # the same on all ranks: nothing may depend on it
    model = laid_out(MODELS.get(strategy, network)(), layout)
    arguments: dict[str, Any] = {"noise_multiplier": 1.0, "seed": 1, "rank_timeout": 60.0}
    if options.get("sampling") != "full":
        arguments["batch_size"] = 8
    with make_private(
        model, optimizer_of(optimizer, model), data(size), clipping=STRATEGIES[strategy](), **(arguments | options)
    ) as private:
        train(model, private, steps, strategy == "lipschitz")
        found = {"parameters": whole(model), "statement": str(private.statement()), "steps": private.steps}
        if "ema" in options:
            with private.ema.applied():
                found["averages"] = whole(model)
        return found


def close_to(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 2e-5) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a)
