"""One table that is looked up and multiplied with: an embedding whose weight is the output head's as well.

With R the looked-up rows' part and O = sum_t left_t right_t^T the product's part of an example's gradient,

    |R + O|^2 = |R|^2 + |O|^2 + 2 <R, O>,   <R, O> = sum_u sum_t left_t[id_u] <right_t, row_u>,

so that no [V, n] gradient is written out for each example. The three terms may cancel, and each is rounded:
all of it is done in float64, whose rounding error is added, and so is that of the product that is summed later
(forms.py). An example whose bound would be loose is written out in float64 instead, and summed by itself.

Legend: B examples, T positions, U distinct ids of an example, V rows of the table, n the size of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms import (
    LOOSE,
    NEGLIGIBLE,
    PRODUCT_ERROR,
    Budget,
    Form,
    Outer,
    Rows,
    chunks,
    roundoff,
    squared_norms,
)


class Tied(Form):
    """The sum of an Outer [V, n] and of Rows of the same table."""

    def __init__(self, outer: Outer, rows: Rows) -> None:
        self.outer, self.rows = outer, rows
        self.batch, self.shape = outer.batch, outer.shape
        self.dtype = torch.promote_types(outer.dtype, rows.dtype)
        self._apart: tuple[int, ...] = ()

    def squared_norms(self, budget: Budget) -> Tensor:
        left, right = self.outer.left, self.outer.right
        T, n = left.shape[1], right.shape[2]
        ids_BU, rows_BUn = self._padded()
        U = ids_BU.shape[1]
        mass_B = (_lengths(left) * _lengths(right)).sum(1)
        size_B = torch.empty_like(mass_B)  # of R, row by row
        square_B = torch.empty_like(mass_B)
        for c in chunks(self.batch, 8 * (T * (left.shape[2] + n + 2 * T + U) + U * (n + T))):
            l_bTV, r_bTn, rows_bUn = (x[c].double() for x in (left, right, rows_BUn))
            picked_bUT = l_bTV.mT.gather(1, ids_BU[c][..., None].expand(-1, -1, T))
            cross_b = (picked_bUT * (rows_bUn @ r_bTn.mT)).sum((1, 2))
            own_b = torch.einsum("bts,bts->b", l_bTV @ l_bTV.mT, r_bTn @ r_bTn.mT)
            size_B[c] = torch.linalg.vector_norm(rows_bUn, dim=2).sum(1)
            square_B[c] = own_b + 2 * cross_b + rows_bUn.square().sum((1, 2))
        terms = left.shape[2] + n + T**2 + 2 * U * T + U * n + 8
        square_B = square_B.clamp_min(0) + terms * roundoff(torch.float64) * (mass_B + size_B).square()
        slack_B = PRODUCT_ERROR * roundoff(self.dtype) * (mass_B + size_B)
        bound_B = (square_B.sqrt() + slack_B).square()
        loose_B = (slack_B > LOOSE * square_B.sqrt()) & torch.isfinite(bound_B) & (bound_B > NEGLIGIBLE**2)
        self._apart = tuple(loose_B.nonzero().flatten().tolist())
        for i in self._apart:
            bound_B[i] = squared_norms(self._in_float64(i).reshape(1, -1))[0]
        return bound_B

    def _padded(self) -> tuple[Tensor, Tensor]:
        """The distinct ids and rows of each example: [B, U] and [B, U, n], with zero rows behind the last."""
        example, ids, rows = self.rows.merged()
        count_B = torch.bincount(example, minlength=self.batch)
        place = torch.arange(len(example), device=ids.device) - (count_B.cumsum(0) - count_B)[example]
        ids_BU = ids.new_zeros((self.batch, max(1, int(count_B.max()))))
        ids_BU[example, place] = ids
        rows_BUn = rows.new_zeros((*ids_BU.shape, rows.shape[1]))
        rows_BUn[example, place] = rows
        return ids_BU, rows_BUn

    def _in_float64(self, example: int) -> Tensor:
        owner, ids, rows = self.rows.merged()
        mine = owner == example
        total = self.outer.left[example].double().T @ self.outer.right[example].double()
        return total.index_add_(0, ids[mine], rows[mine].double())

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        rest_B = w_B.clone()
        rest_B[list(self._apart)] = 0
        total = self.outer.weighted_sum(rest_B).to(self.dtype) + self.rows.weighted_sum(rest_B)
        for i in self._apart:
            total += (w_B[i] * self._in_float64(i)).to(self.dtype)
        return total

    def instantiate(self, examples: slice) -> Tensor:
        return self.outer.instantiate(examples) + self.rows.instantiate(examples)

    def mass(self, example: int) -> float:
        return self.outer.mass(example) + self.rows.mass(example)

    def mute(self, muted_B: Tensor) -> None:
        self.outer.mute(muted_B)
        self.rows.mute(muted_B)
        self._apart = tuple(i for i in self._apart if not bool(muted_B[i]))


def _lengths(x_BTm: Tensor) -> Tensor:
    """An upper bound on the length of each position's row: [B, T] in float64."""
    B, T, m = x_BTm.shape
    return squared_norms(x_BTm.reshape(B * T, m)).view(B, T).sqrt()
