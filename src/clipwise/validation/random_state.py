"""Fixed random numbers for a block of code, and a model with other tensors for one call. Both leave no trace."""

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
    """In this block torch, numpy and Python draw from a given seed. Afterwards they go on where they were.

    CUDA generators are included once CUDA is in use. (To seed them earlier would start CUDA, or leave the seed behind.)
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
    """Equal after two blocks from one seed if they drew equally many numbers."""
    of_numpy: Any = np.random.get_state()
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if _uses_cuda() else [])]
    return [t.numpy().tobytes() for t in of_torch], random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class _Around(nn.Module):
    """A function as a module around the model, whose tensors `functional_call` can exchange while it runs."""

    def __init__(self, model: nn.Module, act: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self._act = act

    def forward(self) -> Any:
        return self._act()


def with_other_tensors(model: nn.Module, tensors: Mapping[str, Tensor], act: Callable[[], Found]) -> Found:
    """What `act` returns while the model has these tensors for its own, and copies of its buffers.

    The model's parameters and buffers are untouched, and back in their places afterwards. A model with layers that have
    public statistics keeps its own tensors, because the statistics belong to them.
    """
    if any(isinstance(module, PublicBatchNorm) for module in model.modules()):
        return act()
    buffers = {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
    given = {f"model.{name}": t for name, t in {**buffers, **tensors}.items()}
    # A forward pass of a recurrent layer lists the weights that it finds.
    listed = [(m, list(m._flat_weights)) for m in model.modules() if isinstance(m, nn.RNNBase)]
    try:
        found: Found = torch.func.functional_call(_Around(model, act), given, (), tie_weights=False)
    finally:
        for layer, weights in listed:
            layer._flat_weights = weights
    return found
