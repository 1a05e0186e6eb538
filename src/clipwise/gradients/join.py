"""All uses of one parameter become one form, before any norm is taken.

|g1 + g2|^2 is not |g1|^2 + |g2|^2: a tied weight or a module called twice needs the cross terms. Products
and rows of the same kind are joined by laying their positions side by side, a product and rows of one table by
their cross term (forms/tied.py); everything else is written out example by example and added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.gradients.derived import Path
from clipwise.gradients.forms import Form, Outer, Rows, Tied, Written
from clipwise.gradients.operations import TRANSPOSE


class Contribution(NamedTuple):
    """The gradients of one use with respect to one tensor, and that tensor's path to the parameters."""

    form: Form
    path: Path


def join(parameters: Mapping[str, torch.nn.Parameter], found: list[Contribution]) -> dict[str, Contribution]:
    """One contribution for each parameter, on an isometric path."""
    by_parameter: dict[str, list[Contribution]] = {}
    for c in found:
        for name in c.path.parameters:
            by_parameter.setdefault(name, []).append(c)
    return {name: joined(name, parameters[name], by_parameter[name]) for name in parameters}


def joined(name: str, parameter: torch.nn.Parameter, uses: list[Contribution]) -> Contribution:
    """One contribution from all uses of one parameter."""
    if all(c.path.isometric for c in uses):
        if len(uses) == 1:
            return uses[0]
        forms = [_upright(c) for c in uses]
        form = _side_by_side([f for f in forms if f is not None]) if None not in forms else None
        if form is not None:
            return Contribution(form, Path.identity(name, parameter))

    def make(examples: slice) -> Tensor:
        total = uses[0].path.pull_each(uses[0].form.instantiate(examples))[name]
        for c in uses[1:]:
            total = total + c.path.pull_each(c.form.instantiate(examples))[name]
        return total

    written = Written(uses[0].form.batch, parameter.shape, parameter.dtype, make)
    return Contribution(written, Path.identity(name, parameter))


def _upright(c: Contribution) -> Form | None:
    """The form of the parameter itself, where the path is none or a transpose."""
    if c.path.steps == ():
        return c.form
    if c.path.steps == (TRANSPOSE,) and isinstance(c.form, Outer):
        return Outer(c.form.right, c.form.left)
    return None


def _side_by_side(forms: list[Form]) -> Form | None:
    """Positions of several products, and entries of several lookups, in one form of each kind."""
    outers = [f for f in forms if isinstance(f, Outer)]
    rows = [f for f in forms if isinstance(f, Rows)]
    if len(outers) + len(rows) < len(forms) or len({f.V for f in rows}) > 1:
        return None  # (some by whole rows, others by single entries)
    outer = _one_product(outers) if outers else None
    table = _one_table(rows) if rows else None
    if outer is None or table is None:
        return outer or table
    return Tied(outer, table) if outer.shape == table.shape and outer.shape[0] == table.V else None


def _one_product(outers: list[Outer]) -> Outer:
    if len(outers) == 1:
        left, right = outers[0].left, outers[0].right
    else:
        left, right = (
            torch.cat(parts, 1) for parts in zip(*((f.left, f.right) for f in outers), strict=True)
        )
    return Outer(left, right, outers[0].shape, upright=True)


def _one_table(rows: list[Rows]) -> Rows:
    if len(rows) == 1:
        return rows[0]
    entries = zip(*((f.example, f.ids, f.g) for f in rows), strict=True)
    example, ids, g = (torch.cat(parts) for parts in entries)
    each = sum(f.each for f in rows if f.each is not None) if all(f.each for f in rows) else None
    return Rows(example, ids, g, rows[0].batch, rows[0].shape, each)
