"""The registry of rules. A rule computes the per-example gradients of one kind of operation.

A rule runs in two parts, because an autograd node gives access to its saved tensors only before the backward pass and
to its output gradient only after. The first part reads the saved tensors and returns `finish`. `finish` turns the
output gradient into one form for each requested operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, real
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node, dtype_at, node_name

Shapes = Mapping[int, torch.Size]  # operand position -> shape of that operand
Finish = Callable[[Tensor, Layout], dict[int, Form]]
Rule = Callable[[Node, Shapes], Finish]

# For operations with several outputs: keyed by output number. Outputs without a gradient are missing.
Outputs = Mapping[int, Tensor]
Layouts = Mapping[int, Layout]
FinishAll = Callable[[Outputs, Layouts], dict[int, Form]]
RuleForAll = Callable[[Node, Shapes], FinishAll]


class RuleDoesNotApply(Exception):  # noqa: N818 (a signal between modules, not an error)
    """The rule does not cover this case of the operation. The fallback is used instead."""


def require_axis(layout: Layout, axis: int) -> None:
    """Raise RuleDoesNotApply if the examples lie along another axis."""
    if layout.axis != axis:
        raise RuleDoesNotApply(f"the examples do not lie along axis {axis}")


_RULES: dict[str, Rule] = {}
_TAKES_COMPLEX: set[str] = set()
_RULES_FOR_ALL: dict[str, RuleForAll] = {}


def register(*names: str, takes_complex: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for the first output of the autograd nodes with these names.

    A rule is a function `rule(node, shapes)`. `shapes` maps the positions of the operands that need per-example
    gradients to their shapes; positions count the tensor arguments only. The rule reads the tensors that the node saved
    and returns `finish(g, layout)`. `finish` takes the output gradient and the layout of the examples in it, and
    returns one form for each operand in `shapes`. Raise RuleDoesNotApply for a case that the rule does not cover.
    clipwise compares the first batches of every new graph with plain autograd, so that a wrong rule is detected before
    anything is released.

    With `takes_complex`, the rule is also called for complex outputs. Gradients then follow torch's convention
    dL/dRe + i dL/dIm, and the imaginary part is dropped for real operands.

    Example, for a `torch.autograd.Function` called Scale that computes x * w for w of shape [n]:

        @clipwise.gradients.register("ScaleBackward")
        def scale(node, shapes):
            x, _ = node.saved_tensors

            def finish(g, layout):  # [..., n] -> [B, positions, n] -> [B, n]
                return {1: clipwise.gradients.Written.of(layout.rows(g * x).sum(1))}

            return finish
    """

    def enter(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        _TAKES_COMPLEX.difference_update(names)
        _TAKES_COMPLEX.update(names if takes_complex else ())
        return rule

    return enter


def register_for_all_outputs(*names: str) -> Callable[[RuleForAll], RuleForAll]:
    """Register a rule for operations with several outputs: `finish(outputs, layouts)` takes mappings."""

    def enter(rule: RuleForAll) -> RuleForAll:
        for name in names:
            _RULES_FOR_ALL[name] = rule
        return rule

    return enter


def registered() -> Mapping[str, Rule | RuleForAll]:
    """All rules, keyed by node name."""
    return {**_RULES, **_RULES_FOR_ALL}


def begin(node: Node, shapes: Shapes) -> FinishAll | None:
    """Read the saved tensors. None if no rule applies, or if torch uses other names for the saved tensors."""
    name = node.name()
    try:
        if name in _RULES_FOR_ALL:
            return _RULES_FOR_ALL[name](node, shapes)
        if name in _RULES:
            return _of_the_first(_RULES[name](node, shapes), node)
    except (RuleDoesNotApply, AttributeError):
        pass
    return None


def covers(node: Node) -> bool:
    """Whether the node's rule supports the dtype of its output."""
    return not dtype_at(node, 0).is_complex or node_name(node) in _TAKES_COMPLEX


def _of_the_first(finish: Finish, node: Node) -> FinishAll:
    def finish_all(outputs: Outputs, layouts: Layouts) -> dict[int, Form]:
        if set(outputs) != {0}:
            raise RuleDoesNotApply("an output other than the first has a gradient")
        g, layout = outputs[0], layouts[0]
        if not g.is_complex():
            return finish(g, layout)
        if not covers(node):
            raise RuleDoesNotApply("the output is complex")
        inputs = node.next_functions
        forms = finish(g, layout)
        return {j: f if dtype_at(*inputs[j]).is_complex else real(f) for j, f in forms.items()}

    return finish_all
