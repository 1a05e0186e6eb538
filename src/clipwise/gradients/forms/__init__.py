"""The forms that per-example gradients can take, and what can be done with each.

    Outer    sum_t left_t right_t^T, never written out unless that is cheaper (linear layers)
    Rows     a few rows of a table (embeddings)
    Tied     the sum of an Outer and of Rows of one table (an embedding that is the output head as well)
    Windows  a convolution of few positions and many channels, as a sum over windows of its input
    Written  a tensor for each example (biases, norms, convolutions, anything else)

A rule turns one operation into forms; norms, weighted sums and instantiation are written once, here.
"""

from clipwise.gradients.forms.base import (
    Budget,
    Form,
    as_real,
    at_least_float32,
    chunks,
    measured,
    squared_norms,
)
from clipwise.gradients.forms.outer import Outer, gram_pays_on_cuda
from clipwise.gradients.forms.rows import Rows
from clipwise.gradients.forms.tied import Tied
from clipwise.gradients.forms.windows import Windows, windows_pay
from clipwise.gradients.forms.written import Permuted, Written, real, written_products

__all__ = [
    "Budget",
    "Form",
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
