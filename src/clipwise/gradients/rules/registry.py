"""The registry of rules. A rule computes the per-example gradients of one kind of operation.

A rule runs in two parts, because an autograd node gives access to its saved tensors only before the backward pass and
to its output gradient only after. The first part reads the saved tensors and returns `finish`. `finish` turns the
output gradient into one form for each requested operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from clipwise.gradients.forms import Form, real
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node, dtype_at

Shapes = Mapping[int, torch.Size]  # operand position -> shape of that operand
Finish = Callable[[Tensor, Layout], dict[int, Form]]
Rule = Callable[[Node, Shapes], Finish]

# For operations with several outputs: keyed by output number. Outputs without a gradient are missing.
Outputs = Mapping[int, Tensor]
Layouts = Mapping[int, Layout]
FinishAll = Callable[[Outputs, Layouts], dict[int, Form]]
RuleForAll = Callable[[Node, Shapes], FinishAll]
Some = TypeVar("Some", Rule, RuleForAll)


class RuleDoesNotApply(Exception):  # noqa: N818 (a signal between modules, not an error)
    """The rule does not cover this case of the operation. The fallback is used instead."""


def require_axis(layout: Layout, axis: int) -> None:
    """Raise RuleDoesNotApply if the examples lie along another axis."""
    if layout.axis != axis:
        raise RuleDoesNotApply(f"the examples do not lie along axis {axis}")


class Registered(NamedTuple):
    """A rule, and what it covers."""

    rule: Rule | RuleForAll
    takes_complex: bool = False
    for_all: bool = False  # whether `finish` takes mappings of all outputs


RULES: dict[str, Registered] = {}


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

    return _entering(names, takes_complex=takes_complex)


def register_for_all_outputs(*names: str) -> Callable[[RuleForAll], RuleForAll]:
    """Register a rule for operations with several outputs: `finish(outputs, layouts)` takes mappings."""

    return _entering(names, for_all=True)


def _entering(names: tuple[str, ...], **covers: bool) -> Callable[[Some], Some]:
    def enter(rule: Some) -> Some:
        RULES.update(dict.fromkeys(names, Registered(rule, **covers)))
        return rule

    return enter


def registered() -> Mapping[str, Rule | RuleForAll]:
    """All rules, keyed by node name."""
    return {name: found.rule for name, found in RULES.items()}


class Begun(NamedTuple):
    """The first part of a rule is done. A call finishes it."""

    node: Node
    finish: Any
    for_all: bool

    def __call__(self, outputs: Outputs, layouts: Layouts) -> dict[int, Form]:
        """One form for each requested operand."""
        if self.for_all:
            found: dict[int, Form] = self.finish(outputs, layouts)
            return found
        if set(outputs) != {0}:
            raise RuleDoesNotApply("an output other than the first has a gradient")
        if outputs[0].is_complex() and not covers(self.node):
            raise RuleDoesNotApply("the output is complex")
        found, inputs = self.finish(outputs[0], layouts[0]), self.node.next_functions
        if not outputs[0].is_complex():
            return found
        return {j: f if dtype_at(*inputs[j]).is_complex else real(f) for j, f in found.items()}


def begin(*uses: tuple[Node, Shapes]) -> list[Begun | None]:
    """Read the saved tensors. None if no rule applies, or if torch uses other names for the saved tensors."""
    begun: list[Begun | None] = []
    for node, shapes in uses:
        found = RULES.get(node.name())
        try:
            begun.append(found and Begun(node, found.rule(node, shapes), found.for_all))
        except (RuleDoesNotApply, AttributeError):
            begun.append(None)
    return begun


def covers(node: Node) -> bool:
    """Whether the node's rule supports the dtype of its output."""
    found = RULES.get(node.name())
    return not dtype_at(node, 0).is_complex or (found is not None and found.takes_complex)
