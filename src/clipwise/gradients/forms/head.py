"""Head: the gradient of an output layer with cross entropy, from tiles of the vocabulary.

With x_t the input of position t and p_t the softmax of its logits W x_t + b,

    gradient_i = sum_t delta_t x_t^T,   delta_t = g_t (p_t - e_(target t)).

delta has an entry for each position and each of V words. It is computed again for each tile of words, and never
stored. Nor is a gradient [V, d]: a tile of it is measured and dropped. Tiles are disjoint rows of the gradient, so
their squared norms add up. Rows of a lookup in the same table (a tied embedding) are added to the tile before it is
measured.

**What is measured is what is summed.** The norms and the sum compute each tile with the same operations on operands of
the same shapes, which gives the same bits. Squares of each tile are kept from the first time. If they differ the second
time, the example's part of that tile is left out of the sum: fewer rows have a smaller norm. The product over positions
errs as in every `Product`, by c u M.

Legend: B examples (b in a chunk), T positions, d features, V words (v in a tile), U entries of a lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.gradients.forms.base import Budget, Written, chunks, lengths, squared_norms, zeroed
from clipwise.gradients.forms.outer import Product
from clipwise.gradients.forms.rows import Rows

TILE_BYTES = 64 * 2**20  # of logits at a time
_WORDS = 2048  # of a tile


@dataclass(frozen=True)
class Words:
    """The weights [V, d] and the bias [V] of an output layer, and the dtype of its products."""

    weight: Tensor
    bias: Tensor | None
    products: torch.dtype

    def tiles(self, width: int | None = None) -> list[slice]:
        """The vocabulary in slices."""
        V, width = len(self.weight), width or _WORDS
        return [slice(v, min(v + width, V)) for v in range(0, V, width)]

    def logits(self, x_Nd: Tensor, words: slice) -> Tensor:
        """[..., d] to [..., v], in float32 or better."""
        product = x_Nd.to(self.products) @ self.weight[words].to(self.products).T
        product = product.float() if product.dtype in (torch.bfloat16, torch.float16) else product
        return product if self.bias is None else product + self.bias[words].to(product.dtype)

    def delta(self, x_Nd: Tensor, lse_N: Tensor, target_N: Tensor, g_N: Tensor, words: slice) -> Tensor:
        """g (p - e_target) for some words: [..., v]. A position with g = 0 gives 0, whatever its logits."""
        delta_Nv = (self.logits(x_Nd, words) - lse_N[..., None]).exp_()
        place_N = target_N - words.start
        inside_N = (place_N >= 0) & (place_N < delta_Nv.shape[-1])
        place_N = place_N.clamp(0, delta_Nv.shape[-1] - 1)[..., None]
        delta_Nv.scatter_add_(-1, place_N, -inside_N[..., None].to(delta_Nv.dtype))
        return delta_Nv.mul_(g_N[..., None]).masked_fill_((g_N == 0)[..., None], 0)


class Head(Product):
    """gradient_i = sum_t delta_t x_t^T, of the shape [V, d]; and rows of a lookup in the same table, if any."""

    keeps_exact = False  # a whole table

    def __init__(
        self, words: Words, x_BTd: Tensor, lse_BT: Tensor, target_BT: Tensor, g_BT: Tensor, rows: Rows | None = None
    ) -> None:
        super().__init__()
        self._words, self._x, self._lse, self._target, self._g = words, x_BTd, lse_BT, target_BT, g_BT
        self._rows = rows
        self.batch, self.shape, self.dtype = len(x_BTd), words.weight.shape, lse_BT.dtype
        self._seen: dict[tuple[int, int], Tensor] = {}  # squares of delta, by chunk and tile

    def with_rows(self, rows: Rows) -> Head:
        """The sum of this and of a lookup in the same table."""
        return Head(self._words, self._x, self._lse, self._target, self._g, rows)

    def squared_norms(self, budget: Budget) -> Tensor:
        square_B, size_B, left_B = (
            torch.zeros(*shape, dtype=torch.float64, device=self._g.device)
            for shape in ((self.batch,), (self.batch,), self._g.shape)
        )
        entries = None if self._rows is None else self._rows.by_example()
        if entries is not None:
            size_B += lengths(entries[1]).sum(1)
        for c in self._chunks():
            for words, delta_bTv in self._deltas(c):
                rows_bT = squared_norms(delta_bTv.flatten(0, 1)).view(delta_bTv.shape[:2])
                self._seen[c.start, words.start] = rows_bT
                left_B[c] += rows_bT
                square_B[c] += squared_norms(self._tile(c, words, delta_bTv, entries).flatten(1))
        mass_B = (left_B.sqrt() * lengths(self._x)).sum(1)
        return self._bound(square_B.sqrt(), mass_B + size_B, budget, rounded_mass_B=mass_B)

    def _chunks(self) -> list[slice]:
        _, T, d = self._x.shape
        v = min(_WORDS, self.shape[0])
        return chunks(self.batch, self.dtype.itemsize * (2 * T * v + v * d), TILE_BYTES)

    def _deltas(self, c: slice) -> Iterator[tuple[slice, Tensor]]:
        for words in self._words.tiles():
            yield words, self._words.delta(self._x[c], self._lse[c], self._target[c], self._g[c], words)

    def _tile(self, c: slice, words: slice, delta_bTv: Tensor, entries: tuple[Tensor, Tensor] | None) -> Tensor:
        """The rows of some words of the gradients: [b, v, d]."""
        tile_bvd = torch.bmm(delta_bTv.mT, self._x[c].to(self.dtype))
        if entries is None:
            return tile_bvd
        ids_bU, rows_bUd = entries[0][c] - words.start, entries[1][c]
        v = tile_bvd.shape[1]
        is_inside = (ids_bU >= 0) & (ids_bU < v)
        rows_bUd = rows_bUd.masked_fill(~is_inside[..., None], 0).to(self.dtype)
        return tile_bvd.scatter_add_(1, ids_bU.clamp(0, v - 1)[..., None].expand_as(rows_bUd), rows_bUd)

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        rest_B = self._without_exact(w_B)
        total = torch.zeros(self.shape, dtype=self.dtype, device=self._g.device)
        for c in self._chunks():
            for words, delta_bTv in self._deltas(c):
                w_b = rest_B[c]
                seen_bT = self._seen.get((c.start, words.start))
                if seen_bT is not None:
                    again_bT = squared_norms(delta_bTv.flatten(0, 1)).view(seen_bT.shape)
                    w_b = torch.where((again_bT == seen_bT).all(1), w_b, 0)
                scaled = (self._x[c] * w_b.to(self.dtype)[:, None, None]).to(self.dtype)
                total[words] += delta_bTv.flatten(0, 1).T @ scaled.flatten(0, 1)
        if self._rows is not None:
            total = self._rows.add_weighted_sum(total, rest_B)
        return self._add_exact(total, w_B)

    def _in_float64(self, example: int) -> Tensor:
        gradient = torch.empty(self.shape, dtype=torch.float64, device=self._g.device)
        (c,) = [c for c in self._chunks() if c.start <= example < c.stop]
        for words, delta_bTv in self._deltas(c):
            i = example - c.start
            gradient[words] = delta_bTv[i].double().T @ self._x[example].double()
        if self._rows is not None:
            owner, ids, rows = self._rows.merged()
            gradient.index_add_(0, ids[owner == example], rows[owner == example].double())
        return gradient

    def instantiate(self, examples: slice) -> Tensor:
        first, last, _ = examples.indices(self.batch)
        entries = None if self._rows is None else self._rows.by_example()
        c = slice(first, last)
        return torch.cat([self._tile(c, words, delta, entries) for words, delta in self._deltas(c)], 1)

    def bias(self) -> Written:
        """The gradients of the bias: delta, summed over positions."""

        def make(examples: slice) -> Tensor:
            return torch.cat([delta.sum(1) for _, delta in self._deltas(examples)], 1)

        return Written(self.batch, self.shape[:1], self.dtype, make)

    def mass(self, example: int) -> float:
        c = slice(example, example + 1)
        left_T = sum(squared_norms(delta[0]) for _, delta in self._deltas(c))
        found = torch.as_tensor(left_T).sqrt() @ torch.linalg.vector_norm(self._x[example].double(), dim=1)
        return float(found) + (0.0 if self._rows is None else self._rows.mass(example))

    def mute(self, muted_B: Tensor) -> None:
        self._x, self._g = zeroed(self._x, muted_B), zeroed(self._g, muted_B)
        self._seen.clear()
        if self._rows is not None:
            self._rows.mute(muted_B)
        super().mute(muted_B)
