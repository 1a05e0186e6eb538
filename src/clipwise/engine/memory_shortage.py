"""Out of memory: a step gathers its batch in smaller pieces.

The bounded sum of a batch is the sum over its pieces, so only the order of additions changes (and, in a model with
random layers, which random numbers a row gets). Nothing is charged before the sum is complete: the step stays one
release. This needs a loss that clipwise calls, as in `private.compiled`. In the user's own loop the error is raised;
use `max_physical_batch_size` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host. (Torch has no type for the latter.)"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def with_smaller_pieces(gather: Callable[[int], Found], size: int) -> Found:
    """`gather(k)` for k = size / 2, size / 4, ..., 1, until pieces of k examples fit into memory."""
    while True:
        size = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            return gather(size)
        except (RuntimeError, MemoryError) as error:
            if size == 1 or not is_out_of_memory(error):
                raise
