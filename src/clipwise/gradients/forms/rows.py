"""Rows: a few rows of a table, the gradient of an embedding.

Legend: B examples, K entries (example, id, row) in total, U of one example, V rows of the table, n the size of a row.

`Tied` is a table used both in a lookup and in a product, such as an embedding tied to the output head. With R the
lookup's part and O = sum_t left_t right_t^T the product's part of an example's gradient,

    |R + O|^2 = |R|^2 + |O|^2 + 2 <R, O>,   <R, O> = sum_u sum_t left_t[id_u] <right_t, row_u>,

so no [V, n] gradient is written out per example. |R|^2 and |O|^2 are upper bounds. The cross term has either sign; its
rounding error is added, as is that of the product that is summed later (base.py). An example with a loose bound is
written out in float64 instead, and summed separately. T: positions, U: entries of an example.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.gradients.forms.base import Budget, Form, chunks, lengths, roundoff, squared_norms
from clipwise.gradients.forms.outer import Outer, Product


class Rows(Form):
    """Entry k adds the row g_k to row id_k of example i_k's table of V rows."""

    def __init__(
        self, example_K: Tensor, ids_K: Tensor, g_Kn: Tensor, batch: int, table: torch.Size, each: int | None = None
    ) -> None:
        """`table` is the parameter's shape, of V * n entries in any arrangement.

        `each` is the number of entries per example, if it is the same for all examples.
        """
        self.example, self.ids, self.g, self.each = example_K, ids_K, g_Kn, each
        self.batch, self.shape, self.dtype = batch, table, g_Kn.dtype
        self.V = table.numel() // g_Kn.shape[1]
        self._merged: tuple[Tensor, Tensor, Tensor] | None = None

    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum repeated ids of each example: (example, id, row) of each distinct pair, in order.

        The number of entries is unchanged; rows of zeros (of example 0) fill the end. Norm and weighted sum both use
        these rows, so the measured gradient is the summed one.
        """
        if self._merged is None:
            # (Not `unique`: the host would have to wait for the size of its result.)
            keys_K, order_K = torch.sort(self.example * self.V + self.ids)
            begins_K = torch.ones_like(keys_K)
            begins_K[1:] = keys_K[1:] != keys_K[:-1]
            group_K = begins_K.cumsum(0) - 1
            where_K = torch.empty_like(group_K).scatter_(0, order_K, group_K)
            rows = torch.zeros_like(self.g).index_add_(0, where_K, self.g)
            distinct = torch.zeros_like(keys_K).scatter_(0, group_K, keys_K)
            self._merged = (distinct // self.V, distinct % self.V, rows)
        return self._merged

    def by_example(self) -> tuple[Tensor, Tensor]:
        """Ids and rows as [B, U] and [B, U, n], with rows of zeros if an example has fewer than U entries."""
        order_K = torch.argsort(self.example, stable=True)
        if self.each is not None:
            order_BU = order_K.view(self.batch, self.each)
            return self.ids[order_BU], self.g[order_BU]
        count_B = torch.bincount(self.example, minlength=self.batch)
        example_K = self.example[order_K]
        place_K = torch.arange(len(order_K), device=order_K.device) - (count_B.cumsum(0) - count_B)[example_K]
        ids_BU = self.ids.new_zeros((self.batch, max(1, int(count_B.max()))))
        rows_BUn = self.g.new_zeros((*ids_BU.shape, self.g.shape[1]))
        ids_BU[example_K, place_K], rows_BUn[example_K, place_K] = self.ids[order_K], self.g[order_K]
        return ids_BU, rows_BUn

    def squared_norms(self, budget: Budget) -> Tensor:
        example, _, rows = self.merged()
        total = torch.zeros(self.batch, dtype=torch.float64, device=rows.device)
        return total.index_add_(0, example, squared_norms(rows))

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        table = torch.zeros(self.V, self.g.shape[1], dtype=self.dtype, device=self.g.device)
        return self.add_weighted_sum(table, w_B).view(self.shape)

    def add_weighted_sum(self, table_Vn: Tensor, w_B: Tensor) -> Tensor:
        """The weighted sum, added to a table."""
        example, ids, rows = self.merged()
        return table_Vn.index_add_(0, ids, (rows * w_B.to(self.dtype)[example, None]).to(table_Vn.dtype))

    def instantiate(self, examples: slice) -> Tensor:
        first, last, _ = examples.indices(self.batch)
        example, ids, g = self.example, self.ids, self.g
        if last - first < self.batch:  # (selecting entries makes the host wait for a GPU)
            inside = (example >= first) & (example < last)
            example, ids, g = example[inside] - first, ids[inside], g[inside]
        tables = torch.zeros(last - first, self.V, g.shape[1], dtype=self.dtype, device=g.device)
        return tables.index_put_((example, ids), g, accumulate=True).view(last - first, *self.shape)

    def mass(self, example: int) -> float:
        return float(torch.linalg.vector_norm(self.g[self.example == example].double(), dim=1).sum())

    def mute(self, muted_B: Tensor) -> None:
        self.g = self.g.masked_fill(muted_B[self.example, None], 0)
        self._merged = None


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
