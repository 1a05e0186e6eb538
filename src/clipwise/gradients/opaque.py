"""Models that went through torch.compile: their backward pass is one piece, which tells nothing of single examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clipwise.errors import UnsupportedModelError

COMPILED = "CompiledFunctionBackward"  # the node of a compiled region
REFUSAL = (
    "A part of the model or of the loss was compiled with torch.compile. Its backward pass is one piece, in which the "
    "gradients of single examples cannot be found. Train the model as it is, without torch.compile: "
    "private.compiled(loss) captures the whole private step on CUDA. A compiled copy may be used for evaluation, and "
    "Batch(max_norm=...) takes compiled models."
)


@contextmanager
def explained() -> Iterator[None]:
    """In this block torch's refusal to go back through a compiled region twice is told as what it is."""
    try:
        yield
    except RuntimeError as error:
        if "donated buffer" not in str(error):
            raise
    else:
        return
    raise UnsupportedModelError(REFUSAL)
