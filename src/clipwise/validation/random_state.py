"""Run a block with fixed random numbers, or a call with other model tensors, and restore the state afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.layers.public_batchnorm import PublicBatchNorm

Found = TypeVar("Found")


@contextmanager
def fixed_random_state(seed: int) -> Iterator[None]:
    """Seed torch, NumPy and Python in this block, and restore their states afterwards.

    CUDA generators are included once CUDA is in use: seeding them earlier would start CUDA, or keep the seed.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count())) if _uses_cuda() else []):
        torch.default_generator.manual_seed(seed)
        if _uses_cuda():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def random_state_now() -> tuple[object, ...]:
    """Return the generators' states, which are equal if two blocks drew equally many numbers from one seed."""
    of_numpy: Any = np.random.get_state()
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if _uses_cuda() else [])]
    return [t.numpy().tobytes() for t in of_torch], random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class _Around(nn.Module):
    """Wraps a function and the model in a module, so that `functional_call` can exchange the model's tensors."""

    def __init__(self, model: nn.Module, act: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self._act = act

    def forward(self) -> Any:
        return self._act()


def with_other_tensors(model: nn.Module, tensors: Mapping[str, Tensor], act: Callable[[], Found]) -> Found:
    """Return `act()`, called while the model holds these tensors and copies of its buffers.

    The model's own parameters and buffers are unchanged and restored afterwards. A model with layers of public
    statistics keeps its own tensors, because the statistics belong to them.
    """
    if any(isinstance(module, PublicBatchNorm) for module in model.modules()):
        return act()
    buffers = {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
    given = {f"model.{name}": t for name, t in {**buffers, **tensors}.items()}
    # The forward pass of a recurrent layer overwrites its list of weights.
    listed = [(m, list(m._flat_weights)) for m in model.modules() if isinstance(m, nn.RNNBase)]
    try:
        found: Found = torch.func.functional_call(_Around(model, act), given, (), tie_weights=False)
    finally:
        for layer, weights in listed:
            layer._flat_weights = weights
    return found
