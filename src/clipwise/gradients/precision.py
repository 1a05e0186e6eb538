"""The arithmetic of norms and sums, independent of the user's settings for speed.

Norms are upper bounds for IEEE float32 or float64. A sum over examples that autocast rounds to bfloat16, or that uses
TensorFloat-32 products, can exceed the bound by a per cent, and by more in a large batch. So a run either computes its
sums in IEEE arithmetic, or fixes an error bound on its products in advance and states a sensitivity that includes it
(clipping/per_example.py).

`Rare` checks whether a rare event happened. An example that is not finite, or with positions that cancel, needs extra
work that hardly any batch needs. Checking for one makes the host wait for the device, and a captured step (compiled.py)
cannot check at all. It defers the checks (`PutAside`), continues as if all were negative, and evaluates them before
anything is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of products, and the resulting error of a sum of sum_t left_t right_t^T over examples.

    Args:
        name: "ieee" or "tf32".
        operand_error: a bound on the error that rounded operands cause in an example's part of the sum, relative to its
            mass sum_t |left_t| |right_t|.
        slack: the relative amount by which the stated sensitivity exceeds the clipping norm.
    """

    name: Literal["ieee", "tf32"]
    operand_error: float
    slack: float

    def products(self) -> AbstractContextManager[Any]:
        """A block without autocast, with float32 products in this arithmetic. Switches already set are not written."""
        matrices = "highest" if self.name == "ieee" else "high"
        return _UNCHANGED if _stand(matrices, self.name == "tf32") else _turned(matrices, self.name)


_UNCHANGED = nullcontext()


@contextmanager
def _turned(matrices: str, convolutions: str) -> Iterator[None]:
    with without_autocast(), _matrix_products(matrices), _convolutions(convolutions):
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """A block without autocast."""
    with ExitStack() as stack:
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _stand(matrices: str, tf32_convolutions: bool) -> bool:
    """Whether every switch has the wanted value. cuDNN's is ignored until CUDA is initialized."""
    try:
        return (
            not any(map(torch.is_autocast_enabled, _AUTOCAST))
            and torch.get_float32_matmul_precision() == matrices
            and (not _has_cuda() or torch.backends.cudnn.allow_tf32 == tf32_convolutions)
        )
    except RuntimeError:  # set per backend
        return False


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


IEEE = Arithmetic("ieee", 0.0, 0.0)

# TensorFloat-32 keeps 11 bits, and tensor cores truncate the others: each operand changes by a relative 2^-10. A norm
# may be that of truncated operands. The operand scaled by an example's weight is truncated again, a change of 2^-9.
# Of bfloat16 operands only the scaled one is rounded, by 2^-9. (The last factor covers products of such errors.)
TF32 = Arithmetic("tf32", 2.0**-9 * (1 + 2.0**-8), 2.0**-6)


def chosen_arithmetic(device: torch.device) -> Arithmetic:
    """The arithmetic that the user's settings select: TF32 on CUDA, unless float32 precision is "highest"."""
    if device.type != "cuda":
        return IEEE
    try:
        return IEEE if torch.get_float32_matmul_precision() == "highest" else TF32
    except RuntimeError:  # set per backend, which the common switch does not support
        return TF32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else IEEE


def ieee_arithmetic() -> AbstractContextManager[Any]:
    """A block without autocast and without reduced precision in products."""
    return IEEE.products()


@contextmanager
def without_tf32() -> Iterator[None]:
    """A block without TensorFloat-32; autocast is unchanged."""
    with _matrix_products("highest"), _convolutions("ieee"):
        yield


def _matrix_products(wanted: str) -> AbstractContextManager[Any]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set per backend, which the common switch does not support
        stack = ExitStack()
        stack.enter_context(_backend("cuda", "matmul", "ieee" if wanted == "highest" else "tf32"))
        stack.enter_context(_backend("mkldnn", "matmul", "ieee"))
        return stack
    return _set(torch.set_float32_matmul_precision, before, wanted)


def _convolutions(wanted: str) -> AbstractContextManager[Any]:
    cudnn: Any = torch.backends.cudnn
    try:
        before = cudnn.allow_tf32
    except RuntimeError:
        return _backend("cudnn", "conv", wanted)
    return _set(partial(setattr, cudnn, "allow_tf32"), before, wanted == "tf32")


def _backend(name: str, operation: str, wanted: str) -> AbstractContextManager[Any]:
    products: Any = getattr(getattr(torch.backends, name), operation)
    return _set(partial(setattr, products, "fp32_precision"), products.fp32_precision, wanted)


@contextmanager
def _set(write: Callable[[Any], None], before: Any, wanted: Any) -> Iterator[None]:
    """Set a switch for a block; a switch with the wanted value is not written."""
    if before != wanted:
        write(wanted)
    try:
        yield
    finally:
        if before != wanted:
            write(before)


class Rare:
    """Checks immediately."""

    def any(self, flags: Tensor) -> bool:
        """Whether any of the flags is set."""
        return bool(flags.any())


class PutAside(Rare):
    """Returns False, and stores the flags for later."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []

    def any(self, flags: Tensor) -> bool:
        self._asked.append(flags.any())
        return False

    def happened(self) -> Tensor | None:
        """Whether any deferred check was positive, as a tensor on the device."""
        return torch.stack(self._asked).any() if self._asked else None
