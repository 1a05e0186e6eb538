"""What is known of operations by the names of their backward nodes."""

from __future__ import annotations

ACCUMULATE = "torch::autograd::AccumulateGrad"


def named(*operations: str) -> frozenset[str]:
    """The names of these operations' backward nodes; overloads are numbered."""
    return frozenset(f"{name}Backward{number}" for name in operations for number in range(3))


# Backward functions that keep the norm: they move entries about or pad them with zeros. A cast rounds, by
# less than a relative unit roundoff.
ISOMETRIC = named(
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze"),
    *("Clone", "ToCopy", "Slice", "Select", "Narrow", "Neg", "Flip", "Movedim"),
    *("ViewAsReal", "ViewAsComplex", "Conj", "ConjPhysical"),
)
CASTS = named("ToCopy")
# Between these a cast does not: the imaginary part of a gradient is dropped.
CROSSES = "between real and complex"

# Functions of one tensor and of constants: DERIVED when that tensor is, whatever the batch holds.
PURE = ISOMETRIC | named(
    *("Split", "SplitWithSizes", "Unbind", "Exp", "Log", "Sqrt", "Rsqrt", "Pow", "Abs", "Sigmoid", "Tanh"),
    *("Relu", "Softplus", "Softmax", "Sum", "Mean", "Norm", "LinalgVectorNorm", "Tril", "Triu"),
    *("Angle", "FftR2C", "FftC2C", "FftC2R"),
)

# Functions of nothing but the tensors that they take: DERIVED when all of those are in the graph and are.
CLOSED = PURE | named(
    *("Mm", "Bmm", "Addmm", "Add", "Sub", "Mul", "Div", "Cat", "Stack", "Complex", "Polar"),
    "WeightNormInterface",
)

# Nodes that can move rows about in a way that depends on the data: no layout outlives its batch then.
ROW_MOVERS = named(
    *("Index", "IndexSelect", "IndexPut", "IndexPutImpl", "IndexAdd", "IndexCopy", "Gather", "Scatter"),
    *("ScatterAdd", "Sort", "Topk", "MaskedSelect", "MaskedScatter", "TakeAlongDim", "Take", "AsStrided"),
    *("PackPaddedSequence", "Embedding", "EmbeddingBag"),
) | {"torch::autograd::CopySlices"}

# Numbers by which a node cuts a tensor: the data may choose them, so they are part of an outline.
CUTS = {
    "SelectBackward0": ("_saved_index",),
    "SliceBackward0": ("_saved_start", "_saved_end"),
    "SplitWithSizesBackward0": ("_saved_split_sizes",),
}

# A weight turned on its side is one thing, however it is written.
TRANSPOSE = "TBackward0"
TURNS = frozenset({"PermuteBackward0", "TransposeBackward0"})
