"""Inputs of a bounded length, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import number


class ClipInput(nn.Module):
    """Scales every example down to an L2 norm of `max_norm`, if it is longer: x min(1, C / |x|).

    The first module of a network whose gradients are bounded by its weights. It is a part of the model, so that
    training and evaluation see the same. An example that is not finite counts as 0, and so does one that is longer than
    2^126 C (in float32), whose scale would be rounded. Its place in the graph of a loss shows that the inputs were
    clipped. (So an ordinary `loss.backward()` goes on to the inputs, which costs some time; `torch.autograd.grad` with
    the parameters does not, and neither does a private step.)

    Args:
        max_norm: C, a public constant.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = number("max_norm", max_norm, above=0)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to the same shape."""
        if not x.is_floating_point():
            raise ConfigurationError(
                f"ClipInput takes numbers with a point, not {x.dtype}: convert the input first."
            )
        # The anchor makes a node of the graph although inputs need no gradient.
        anchor = torch.zeros((), requires_grad=True)
        return ClippedInput.apply(x, anchor, self.max_norm)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"max_norm={self.max_norm:g}"


class ClippedInput(torch.autograd.Function):
    """The clip, as a node that knows its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, max_norm: float) -> Tensor:
        rows = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        norms_B = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)  # squares that do not overflow
        scales_B = (max_norm / norms_B).clamp(max=1)
        # Times 1 - eps: rounding the scale and the product must not bring the norm above C.
        scales_B = torch.where(scales_B < 1, scales_B * (1 - torch.finfo(x.dtype).eps), scales_B)
        # A smaller scale would be rounded, perhaps up.
        good_B = torch.isfinite(norms_B) & (scales_B >= torch.finfo(x.dtype).tiny)
        shape = (-1, *[1] * (x.ndim - 1))
        clipped = torch.where(good_B.view(shape), x * scales_B.to(x.dtype).view(shape), 0)
        ctx.save_for_backward(clipped, scales_B.to(x.dtype), good_B)
        ctx.max_norm, ctx.example_shape = max_norm, tuple(x.shape[1:])
        return clipped

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """s g inside the ball; outside, what is along x is taken out: s (g - x (x g) / |x|^2)."""
        clipped, scales_B, good_B = ctx.saved_tensors
        shape = (-1, *[1] * (g.ndim - 1))
        along_B = (
            (clipped * g).flatten(1).sum(1) / ctx.max_norm**2 if g.ndim > 1 else clipped * g / ctx.max_norm**2
        )
        outside_B = (scales_B < 1) & good_B
        radial = torch.where(outside_B.view(shape), clipped * along_B.view(shape), 0)
        return torch.where(good_B.view(shape), scales_B.view(shape) * (g - radial), 0), None, None
