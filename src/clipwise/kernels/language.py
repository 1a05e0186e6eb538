"""Triton's names, or stand-ins that let the kernels' modules load where there is no Triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

_present = find_spec("triton") is not None
triton: Any = import_module("triton") if _present else None
tl: Any = import_module("triton.language") if _present else None

# What a kernel's arguments are annotated with. Triton types them by what is passed, knows compile-time
# arguments by the word `constexpr`, and lets a kernel name nothing in its annotations but its own classes.
if TYPE_CHECKING or not _present:
    Pointer: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Pointer, constexpr = tl.tensor, tl.constexpr


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`; without Triton the function itself, which nobody calls then."""
    return triton.jit(function) if triton is not None else function


def device_of(t: Tensor) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU the current one: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(t.device) if t.device.type == "cuda" else nullcontext()


def blocks(total: int, size: int) -> int:
    """How many blocks of `size` cover `total`."""
    return -(-total // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
