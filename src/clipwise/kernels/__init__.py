"""Fused GPU kernels in Triton, each beside a twin in plain torch that gives the same numbers.

    gram         bounds on per-example norms of sum_t l_t r_t^T, from inner products of positions
    affine       per-example gradients of the scale and the shift of layer, RMS and group norm
    convolution  per-example weight gradients of a convolution with few inputs a window
    patches      the windows of a convolution, copied
    noise        counter-based normals, a whole draw in one launch
    squares      bounds on squared row lengths in one launch

and for backpropagation clipping

    measures     all sums over the positions of a gradient, in one reading
    factors      what examples are scaled by, from what was measured
    scaled       one factor an example, with a bias, in place or not
    tangent      a gradient without what is along the input
    weighted     weighted sums of rows

Every public function takes its kernel where `usable` says so and its twin otherwise. None waits for the
device and none adds floats atomically: all can be captured in a CUDA graph, and all repeat bit by bit.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["usable"]


def usable(t: Tensor) -> bool:
    """Whether Triton can work on this tensor: triton is there, and the tensor is on a GPU from sm_80 on.

    With TRITON_INTERPRET=1 the kernels run in Triton's interpreter, which also takes tensors on the CPU.
    """
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
    """Triton reads this once, when a kernel is declared; so it is read once here."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
