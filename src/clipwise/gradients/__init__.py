"""From losses to the gradients of single examples: norms, weighted sums, all of them exact."""

from clipwise.gradients.bookkeeping import (
    FallbackWarning,
    Memory,
    PerExampleGradients,
    by_bookkeeping,
    by_loop,
)
from clipwise.gradients.rules import register, registered

__all__ = [
    "FallbackWarning",
    "Memory",
    "PerExampleGradients",
    "by_bookkeeping",
    "by_loop",
    "register",
    "registered",
]
