"""Properties of operations, keyed by the names of their backward nodes."""

from __future__ import annotations

from clipwise.errors import UnsupportedModelError

ACCUMULATE = "torch::autograd::AccumulateGrad"


def named(*operations: str) -> frozenset[str]:
    """The names of these operations' backward nodes; overloads are numbered."""
    return frozenset(f"{name}Backward{number}" for name in operations for number in range(3))


# Backward functions that preserve the norm: they move entries or pad them with zeros. A cast rounds by less than a
# relative unit roundoff.
ISOMETRIC = named(
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze"),
    *("Clone", "ToCopy", "Slice", "Select", "Narrow", "Neg", "Flip", "Movedim"),
    *("ViewAsReal", "ViewAsComplex", "Conj", "ConjPhysical"),
)
CASTS = named("ToCopy")
# A cast between these does not preserve it: the imaginary part of a gradient is dropped.
CROSSES = "between real and complex"

# Functions of one tensor and constants: DERIVED if that tensor is, for any batch.
PURE = ISOMETRIC | named(
    *("Split", "SplitWithSizes", "Unbind", "Exp", "Log", "Sqrt", "Rsqrt", "Pow", "Abs", "Sigmoid", "Tanh"),
    *("Relu", "Softplus", "Softmax", "Sum", "Mean", "Norm", "LinalgVectorNorm", "Tril", "Triu"),
    *("Angle", "FftR2C", "FftC2C", "FftC2R"),
)

# Functions of their tensor arguments alone: DERIVED if all arguments are in the graph and DERIVED.
CLOSED = PURE | named(
    *("Mm", "Bmm", "Addmm", "Add", "Sub", "Mul", "Div", "Cat", "Stack", "Complex", "Polar"), "WeightNormInterface"
)

# Nodes that can reorder rows depending on the data: no layout is reused for another batch then.
ROW_MOVERS = named(
    *("Index", "IndexSelect", "IndexPut", "IndexPutImpl", "IndexAdd", "IndexCopy", "Gather", "Scatter"),
    *("ScatterAdd", "Sort", "Topk", "MaskedSelect", "MaskedScatter", "TakeAlongDim", "Take", "AsStrided"),
    *("PackPaddedSequence", "Embedding", "EmbeddingBag"),
) | {"torch::autograd::CopySlices"}

# Arguments that split a tensor: the data may choose them, so they are part of an outline.
CUTS = {
    "SelectBackward0": ("_saved_index",),
    "SliceBackward0": ("_saved_start", "_saved_end"),
    "SplitWithSizesBackward0": ("_saved_split_sizes",),
}

# The different ways to transpose a weight are equivalent.
TRANSPOSE = "TBackward0"
TURNS = frozenset({"PermuteBackward0", "TransposeBackward0"})


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


def explain(error: RuntimeError) -> None:
    """Raise clipwise's explanation of an error of torch about such a part."""
    for part, text in _SAID_BY_TORCH.items():
        if text in str(error):
            raise UnsupportedModelError(REFUSALS[part]) from None
