"""Fused GPU kernels in Triton, each with a twin in plain torch that gives the same numbers.

    gram         bounds on per-example norms of sum_t l_t r_t^T, from inner products of positions
    affine       per-example gradients of the scale and the shift of layer, RMS and group norm
    convolution  per-example weight gradients of a convolution with few inputs per window
    patches      copies of the windows of a convolution
    noise        counter-based normals, a whole draw in one launch
    squares      bounds on squared row norms in one launch

Kernels for backpropagation clipping:

    measures     all sums over the positions of a gradient, in one read
    factors      the scale factors of the examples, from the measured norms
    scaled       scales each example by its factor, with a bias, optionally in place
    tangent      removes the component of a gradient along the input
    weighted     weighted sums of rows

Every public function uses its kernel if `usable` returns True, and its twin otherwise. None synchronizes with the
device and none adds floats atomically: all can be captured in a CUDA graph, and all are deterministic.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from clipwise.kernels.tracing import is_tracing

__all__ = ["supported", "usable"]


def usable(t: Tensor) -> bool:
    """Whether a kernel can run on this tensor now: Triton supports it, and no step is traced.

    A trace has tensors without memory. It holds a kernel inside of an operator (gradients/forms/operators.py), or the
    twin, of which the compiler makes its own kernel.
    """
    return not is_tracing() and _is_supported(t)


def supported(t: Tensor) -> bool:
    """Whether Triton supports this tensor: triton is installed, and the tensor is on a GPU of sm_80 or later.

    With TRITON_INTERPRET=1 the kernels run in Triton's interpreter, which also takes tensors on the CPU.
    """
    return _is_supported(t)


def _is_supported(t: Tensor) -> bool:
    if not _has_triton():
        return False
    if t.device.type == "cuda":
        return _has_tensor_cores(t.device)
    return t.device.type == "cpu" and _is_interpreted()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _is_interpreted() -> bool:
    """Cached, because Triton reads the variable once, when a kernel is declared."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
