"""Exact per-example gradients from a vector of losses: their norms and weighted sums.

`register` adds a rule for a custom operation. A rule returns a form: `Written`, `Outer` or `Rows`.
"""

from clipwise.gradients.examples import PerExampleGradients
from clipwise.gradients.forms import Form, Outer, Rows, Written
from clipwise.gradients.layout import Layout
from clipwise.gradients.methods import METHODS, per_example_gradients
from clipwise.gradients.plain import by_loop
from clipwise.gradients.probed_steps import ProbedWarning
from clipwise.gradients.rules.registry import RuleDoesNotApply, register, register_for_all_outputs, registered
from clipwise.gradients.stream import FallbackWarning, Memory

__all__ = [
    "METHODS",
    "FallbackWarning",
    "Form",
    "Layout",
    "Memory",
    "Outer",
    "PerExampleGradients",
    "ProbedWarning",
    "Rows",
    "RuleDoesNotApply",
    "Written",
    "by_loop",
    "per_example_gradients",
    "register",
    "register_for_all_outputs",
    "registered",
]
