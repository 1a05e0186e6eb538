"""From losses to the gradients of single examples: norms, weighted sums, all of them exact."""

from clipwise.gradients.bookkeeping import FallbackWarning, Memory
from clipwise.gradients.examples import PerExampleGradients
from clipwise.gradients.methods import METHODS, per_example_gradients
from clipwise.gradients.plain import by_loop
from clipwise.gradients.rules import register, registered

__all__ = [
    "METHODS",
    "FallbackWarning",
    "Memory",
    "PerExampleGradients",
    "by_loop",
    "per_example_gradients",
    "register",
    "registered",
]
