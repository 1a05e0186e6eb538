"""A small private run, and a simple independent computation of its results."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import PerExample, Private, make_private

SIZE, FEATURES, HIDDEN, CLASSES = 40, 5, 4, 3
SCHEMES: dict[str, dict[str, Any]] = {  # arguments of `private_run`
    "poisson": {"sampling": "poisson"},
    "fixed-size": {"sampling": "fixed-size"},
    "shuffled": {"sampling": "shuffled", "batch_size": 7},
    "full": {"sampling": "full"},
}
LAYERS = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


def data(size: int = SIZE, dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=random, dtype=torch.float64) * 3
    return TensorDataset(x.to(dtype), torch.randint(0, CLASSES, (size,), generator=random))


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(dtype)


def sgd(model: nn.Module, lr: float = 0.5, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def private_run(
    model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, dataset: Any = None, **options: Any
) -> tuple[nn.Module, Private]:
    """Return a run on the small data, by default with Poisson subsampling and 5 steps per epoch."""
    model = network() if model is None else model
    defaults: dict[str, Any] = {"clipping": PerExample(max_norm=1.0)}
    if options.get("sampling") != "full" and "sample_rate" not in options:
        defaults["batch_size"] = 8
    if "epsilon" not in options:
        defaults["noise_multiplier"] = 1.0
    private = make_private(
        model,
        sgd(model) if optimizer is None else optimizer,
        data() if dataset is None else dataset,
        **{**defaults, **options},
    )
    return model, private


def losses_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def train(model: nn.Module, private: Private, steps: int) -> None:
    """Train for a number of updates, over as many epochs as needed."""
    while steps > 0:
        for batch in private.loader.pieces():
            steps -= private.step(losses_of(model, batch))
            if steps == 0:
                return


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether both are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def clipped_sum_by_hand(
    model: nn.Module, dataset: TensorDataset, indices: Sequence[int], norms: Mapping[tuple[str, ...], float]
) -> dict[str, Tensor]:
    """sum_i min(1, C_k / |g_ik|) g_ik, with one forward pass per example, in float64.

    `norms` gives C_k for each group of parameter names.
    """
    model = copy.deepcopy(model).double()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in indices:
        x, y = dataset[i]
        loss = F.cross_entropy(model(x.double()[None]), y[None])
        found = dict(zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        for names, bound in norms.items():
            norm = torch.cat([found[n].flatten() for n in names]).norm()
            for n in names:
                total[n] += found[n] * min(1.0, bound / float(norm))
    return total
