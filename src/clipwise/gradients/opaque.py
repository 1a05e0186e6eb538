"""Parts of a graph without access to per-example gradients: torch.compile regions, reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clipwise.errors import UnsupportedModelError

COMPILED = "CompiledFunctionBackward"  # the node of a compiled region
REENTRANT = "CheckpointFunctionBackward"  # of a checkpoint with use_reentrant=True
REFUSALS = {
    COMPILED: "A part of the model or of the loss was compiled with torch.compile. Its backward pass is one unit, in "
    "which per-example gradients are not accessible. Train the model without torch.compile: "
    "private.compiled(loss) captures the whole private step on CUDA. A compiled copy may be used for evaluation, and "
    "Batch(max_norm=...) takes compiled models.",
    REENTRANT: "Reentrant activation checkpointing hides the parameters inside it. Call "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead.",
}
_SAID_BY_TORCH = {COMPILED: "donated buffer", REENTRANT: "use_reentrant=True"}


def require_not_rerun(*names: str) -> None:
    """Raise for a part of the model that runs again in the backward pass: the graph does not show its contents."""
    if REENTRANT in names:
        raise UnsupportedModelError(REFUSALS[REENTRANT])


@contextmanager
def explained() -> Iterator[None]:
    """Replace torch's error about such a part by clipwise's explanation."""
    try:
        yield
        return
    except RuntimeError as error:
        met = next((piece for piece, said in _SAID_BY_TORCH.items() if said in str(error)), None)
        if met is None:
            raise
    raise UnsupportedModelError(REFUSALS[met])
