"""Parts of a graph without access to per-example gradients: torch.compile regions, reentrant checkpointing."""

from __future__ import annotations

from clipwise.errors import UnsupportedModelError

COMPILED = "CompiledFunctionBackward"  # the node of a compiled region
REENTRANT = "CheckpointFunctionBackward"  # of a checkpoint with use_reentrant=True
REFUSALS = {
    COMPILED: "A part of the model or of the loss was compiled with torch.compile, and make_private did not see it. "
    "Its backward pass is one unit, in which per-example gradients are not accessible. Give make_private the compiled "
    "model, which then runs uncompiled where gradients are needed, or compute the losses without torch.compile. "
    "private.compiled(loss) compiles the whole private step. Batch(max_norm=...) takes compiled models.",
    REENTRANT: "Reentrant activation checkpointing hides the parameters inside it. Call "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead.",
}
_SAID_BY_TORCH = {COMPILED: "donated buffer", REENTRANT: "use_reentrant=True"}


def require_not_rerun(*names: str) -> None:
    """Raise for a part of the model that runs again in the backward pass: the graph does not show its contents."""
    if REENTRANT in names:
        raise UnsupportedModelError(REFUSALS[REENTRANT])


def explain(error: RuntimeError) -> None:
    """Raise clipwise's explanation of an error of torch about such a part."""
    for part, text in _SAID_BY_TORCH.items():
        if text in str(error):
            raise UnsupportedModelError(REFUSALS[part]) from None
