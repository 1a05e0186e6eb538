"""Pieces of a graph that cannot be looked into: models that went through torch.compile, reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clipwise.errors import UnsupportedModelError

COMPILED = "CompiledFunctionBackward"  # the node of a compiled region
REENTRANT = "CheckpointFunctionBackward"  # of a checkpoint with use_reentrant=True
REFUSALS = {
    COMPILED: "A part of the model or of the loss was compiled with torch.compile. Its backward pass is one piece, in "
    "which the gradients of single examples cannot be found. Train the model as it is, without torch.compile: "
    "private.compiled(loss) captures the whole private step on CUDA. A compiled copy may be used for evaluation, and "
    "Batch(max_norm=...) takes compiled models.",
    REENTRANT: "Reentrant activation checkpointing hides the parameters inside it. Call "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead.",
}
_SAID_BY_TORCH = {COMPILED: "donated buffer", REENTRANT: "use_reentrant=True"}


def require_not_rerun(*names: str) -> None:
    """Refuse a part of the model that runs once more in the backward pass: no graph shows what is in it."""
    if REENTRANT in names:
        raise UnsupportedModelError(REFUSALS[REENTRANT])


@contextmanager
def explained() -> Iterator[None]:
    """In this block torch's refusal to go back through such a piece is told as what it is."""
    try:
        yield
        return
    except RuntimeError as error:
        met = next((piece for piece, said in _SAID_BY_TORCH.items() if said in str(error)), None)
        if met is None:
            raise
    raise UnsupportedModelError(REFUSALS[met])
