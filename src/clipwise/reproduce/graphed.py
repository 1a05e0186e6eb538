"""A model's two passes as CUDA graphs, for strategies whose step is not captured as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.compiled import CaptureWarning

Forward = Callable[[Tensor], Tensor]


class _Around(nn.Module):
    """Stands before a model, which is not changed: what captures a module puts another forward pass into it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x)
        return found


def graphed(model: nn.Module, example: Tensor) -> Forward:
    """The model, replayed on batches of one shape; itself on others, or where it cannot be captured.

    Gradients reach its parameters as ever, but an operation inside is no longer seen: it is for `Batch`, which needs
    the gradient of a mean alone. The mode (training or not) is that of now. A model with buffers is left as it is.

    Args:
        model: on CUDA; in training mode, for batch norm takes the statistics of a batch.
        example: a batch of images of the shape.
    """
    if example.device.type != "cuda" or any(True for _ in model.buffers()):
        return model
    own = example.detach().clone(memory_format=torch.channels_last)  # batches are copied here
    try:
        replayed: Any = torch.cuda.make_graphed_callables(_Around(model), (own,))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"The model cannot be captured in CUDA graphs: {reason}", CaptureWarning, stacklevel=2)
        return model
    shape = example.shape

    def forward(x: Tensor) -> Tensor:
        found: Tensor = replayed(x) if x.shape == shape and torch.is_grad_enabled() else model(x)
        return found

    return forward
