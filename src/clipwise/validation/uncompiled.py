"""Models that the user compiled with torch.compile.

The backward pass of a compiled region is one unit, in which per-example gradients are not accessible. So a compiled
model runs its original code wherever autograd records, which is where a private step needs its graph. Evaluation under
`torch.no_grad` keeps the compiled code. `private.compiled(loss)` traces the original code and compiles the whole step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _OriginalWithGradient:
    """A compiled function that runs as the original one while autograd records."""

    def __init__(self, compiled: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._compiled, self._original = compiled, original

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return (self._original if torch.is_grad_enabled() else self._compiled)(*arguments, **options)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile(model)`; it and all its parts run uncompiled while autograd records.

    The compiled model that was given, and models and layers on which `compile()` was called, change in place.
    """
    for module in model.modules():
        held: Any = module
        call = held._compiled_call_impl
        if call is not None and not isinstance(call, _OriginalWithGradient):
            held._compiled_call_impl = _OriginalWithGradient(call, held._call_impl)
        if is_compiled(module) and not isinstance(held.forward, _OriginalWithGradient):
            held.forward = _OriginalWithGradient(held.forward, held._orig_mod)
    return model._orig_mod if is_compiled(model) else model  # type: ignore[return-value]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of `torch.compile(module)`."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported, if nothing was compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss in which no compiled function runs compiled."""

    def call(*batch: Any) -> Tensor:
        if "torch._dynamo" not in sys.modules:
            return loss(*batch)
        with torch.compiler.set_stance("force_eager"):
            return loss(*batch)

    return call
