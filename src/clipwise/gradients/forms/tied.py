"""Tied: a table used both in a lookup and in a product, such as an embedding tied to the output head.

With R the lookup's part and O = sum_t left_t right_t^T the product's part of an example's gradient,

    |R + O|^2 = |R|^2 + |O|^2 + 2 <R, O>,   <R, O> = sum_u sum_t left_t[id_u] <right_t, row_u>,

so no [V, n] gradient is written out per example. |R|^2 and |O|^2 are upper bounds. The cross term has either sign; its
rounding error is added, as is that of the product that is summed later (base.py). An example with a loose bound is
written out in float64 instead, and summed separately.

Legend: B examples, T positions, U entries of an example, V rows of the table, n the size of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms.base import Budget, chunks, lengths, roundoff
from clipwise.gradients.forms.outer import Outer, Product
from clipwise.gradients.forms.rows import Rows


class Tied(Product):
    """The sum of an Outer [V, n] and of Rows of the same table."""

    keeps_exact = False  # a whole table

    def __init__(self, outer: Outer, rows: Rows) -> None:
        super().__init__()
        self.outer, self.rows = outer, rows
        self.batch, self.shape = outer.batch, outer.shape
        self.dtype = torch.promote_types(outer.dtype, rows.dtype)

    def squared_norms(self, budget: Budget) -> Tensor:
        own_B, mass_B = self.outer.gram_squares(budget)
        ids_BU, rows_BUn = self.rows.by_example()
        size_B = lengths(rows_BUn).sum(1)
        square_B = own_B + self.rows.squared_norms(budget) + 2 * self._cross_terms(ids_BU, rows_BUn)
        # U T products of length n, and the sum of three terms, each at most (M + |R|)^2.
        terms = 2 * ids_BU.shape[1] * self.outer.left.shape[1] + rows_BUn.shape[2] + 8
        square_B = square_B.clamp_min(0) + terms * roundoff(torch.float64) * (mass_B + size_B).square()
        # |O|^2 may be that of rounded operands; <R, O> is not.
        square_B = square_B + 2 * budget.arithmetic.operand_error * size_B * mass_B
        return self._bound(square_B.sqrt(), mass_B + size_B, budget, rounded_mass_B=mass_B)

    def _cross_terms(self, ids_BU: Tensor, rows_BUn: Tensor) -> Tensor:
        """<R, O>, in float64."""
        left, right = self.outer.left, self.outer.right
        T, U, n = left.shape[1], *rows_BUn.shape[1:]
        cross_B = torch.empty(self.batch, dtype=torch.float64, device=left.device)
        for c in chunks(self.batch, 8 * (2 * T * U + (T + U) * n)):
            picked_bUT = left[c].mT.gather(1, ids_BU[c][..., None].expand(-1, -1, T)).double()
            cross_B[c] = (picked_bUT * (rows_BUn[c].double() @ right[c].double().mT)).sum((1, 2))
        return cross_B

    def _in_float64(self, example: int) -> Tensor:
        owner, ids, rows = self.rows.merged()
        mine = owner == example
        total = self.outer.left[example].double().T @ self.outer.right[example].double()
        return total.index_add_(0, ids[mine], rows[mine].double())

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        rest_B = self._without_exact(w_B)
        total = self.rows.add_weighted_sum(self.outer.weighted_sum(rest_B).to(self.dtype), rest_B)
        return self._add_exact(total, w_B)

    def instantiate(self, examples: slice) -> Tensor:
        return self.outer.instantiate(examples) + self.rows.instantiate(examples)

    def mass(self, example: int) -> float:
        return self.outer.mass(example) + self.rows.mass(example)

    def mute(self, muted_B: Tensor) -> None:
        self.outer.mute(muted_B)
        self.rows.mute(muted_B)
        super().mute(muted_B)
