"""Where rules are entered and found.

A rule knows one kind of operation. It is called twice, because an autograd node gives its saved tensors
only before the backward pass and its output gradient only after: the first call reads what was saved and
returns a function that turns the output gradient into forms, one for each operand that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clipwise.gradients.forms import Form
from clipwise.gradients.layout import Layout
from clipwise.gradients.walk import Node, node_name

Shapes = Mapping[int, torch.Size]  # operand position -> shape of that operand
Finish = Callable[[Tensor, Layout], dict[int, Form]]
Rule = Callable[[Node, Shapes], Finish]


class RuleDoesNotApply(Exception):  # noqa: N818 (a signal between rooms, no error of the user's)
    """This case of the operation is not covered: use the fallback."""


_RULES: dict[str, Rule] = {}


def register(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for the autograd nodes of these names (such as "AddmmBackward0")."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return enter


def registered() -> Mapping[str, Rule]:
    """All rules by node name."""
    return dict(_RULES)


def begin(node: Node, shapes: Shapes) -> Finish | None:
    """Read what the node saved; None where no rule applies or torch names its saved tensors otherwise."""
    rule = _RULES.get(node_name(node))
    if rule is None:
        return None
    try:
        return rule(node, shapes)
    except (RuleDoesNotApply, AttributeError):
        return None
