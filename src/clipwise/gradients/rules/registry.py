"""Where rules are entered and found.

A rule knows one kind of operation. It is called twice, because an autograd node gives its saved tensors
only before the backward pass and its output gradient only after: the first call reads what was saved and
returns a function that turns the output gradient into forms, one for each operand that is wanted.
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

# For operations with several outputs, of which some may have no gradient: by the output's number.
Outputs = Mapping[int, Tensor]
Layouts = Mapping[int, Layout]
FinishAll = Callable[[Outputs, Layouts], dict[int, Form]]
RuleForAll = Callable[[Node, Shapes], FinishAll]


class RuleDoesNotApply(Exception):  # noqa: N818 (a signal between modules, not an error)
    """This case of the operation is not covered: use the fallback."""


def require_axis(layout: Layout, axis: int) -> None:
    """A rule does not apply where the examples lie along another axis."""
    if layout.axis != axis:
        raise RuleDoesNotApply(f"the examples do not lie along axis {axis}")


_RULES: dict[str, Rule] = {}
_TAKES_COMPLEX: set[str] = set()
_RULES_FOR_ALL: dict[str, RuleForAll] = {}


def register(*names: str, takes_complex: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule for the autograd nodes of these names, by their first output.

    A rule is a function `rule(node, shapes)`. `shapes` holds the shapes of those operands whose per-example
    gradients are wanted, by position. It reads what the node saved and returns `finish(g, layout)`: from the
    gradient at the output, and from where the examples lie in it, one form for each wanted operand. It raises
    RuleDoesNotApply where it does not cover a case. The first batches of every new kind of graph are compared
    with plain autograd, so a rule with a mistake in it is found before anything is released. Positions count the
    tensors among the arguments.

    A rule with `takes_complex` is also called where the output is complex. The gradient of a loss L is then
    dL/dRe + i dL/dIm, as torch has it; the imaginary part of what the rule gives for a real operand is dropped. Other
    rules are not called there.

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
    """As `register`, for operations with several outputs: `finish(outputs, layouts)` takes mappings."""

    def enter(rule: RuleForAll) -> RuleForAll:
        for name in names:
            _RULES_FOR_ALL[name] = rule
        return rule

    return enter


def registered() -> Mapping[str, Rule | RuleForAll]:
    """All rules by node name."""
    return {**_RULES, **_RULES_FOR_ALL}


def begin(node: Node, shapes: Shapes) -> FinishAll | None:
    """Read what the node saved; None where no rule applies or torch names its saved tensors otherwise."""
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
    """Whether the node's rule is one for the type of its output."""
    return not dtype_at(node, 0).is_complex or node_name(node) in _TAKES_COMPLEX


def _of_the_first(finish: Finish, node: Node) -> FinishAll:
    def finish_all(outputs: Outputs, layouts: Layouts) -> dict[int, Form]:
        if set(outputs) != {0}:
            raise RuleDoesNotApply("another output than the first has a gradient")
        g, layout = outputs[0], layouts[0]
        if not g.is_complex():
            return finish(g, layout)
        if not covers(node):
            raise RuleDoesNotApply("the output is complex")
        inputs = node.next_functions
        forms = finish(g, layout)
        return {j: f if dtype_at(*inputs[j]).is_complex else real(f) for j, f in forms.items()}

    return finish_all
