"""The forms of per-example gradients, each with norms, weighted sums and instantiation.

    Outer    sum_t left_t right_t^T, written out only if that is cheaper (linear layers)
    Rows     a few rows of a table (embeddings)
    Tied     the sum of an Outer and Rows of one table (an embedding tied to the output head)
    Head     an output layer with cross entropy, from tiles of the vocabulary; may include a tied embedding
    Windows  a convolution with few positions and many channels, as a sum over windows of its input
    Written  one tensor per example (biases, norms, convolutions, all others)

A rule turns one operation into forms.
"""

from clipwise.gradients.forms.base import (
    Budget,
    Form,
    Permuted,
    Written,
    as_real,
    at_least_float32,
    chunks,
    measured,
    real,
    squared_norms,
    written_products,
)
from clipwise.gradients.forms.head import Head
from clipwise.gradients.forms.outer import Outer, gram_pays_on_cuda
from clipwise.gradients.forms.rows import Rows, Tied
from clipwise.gradients.forms.windows import Windows, windows_pay

__all__ = [
    "Budget",
    "Form",
    "Head",
    "Outer",
    "Permuted",
    "Rows",
    "Tied",
    "Windows",
    "Written",
    "as_real",
    "at_least_float32",
    "chunks",
    "gram_pays_on_cuda",
    "measured",
    "real",
    "squared_norms",
    "windows_pay",
    "written_products",
]
