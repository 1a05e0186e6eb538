"""Lookups of table rows: nn.Embedding, nn.EmbeddingBag, table[ids], index_select.

Every position is an entry (example, id, row of g). Padding and positions without an owner are left out. Repeated ids of
one example are summed before squaring (forms.Rows).

Legend: N positions, V rows of the table, n the size of a row, G bags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.errors import CoupledExamplesError
from clipwise.gradients.forms import Form, Rows, at_least_float32
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.rules.registry import Finish, RuleDoesNotApply, Shapes, register, require_axis
from clipwise.gradients.walk import Node

_SUM, _MEAN, _MAX = 0, 1, 2  # torch's numbers for the modes of EmbeddingBag


@register("EmbeddingBackward0")
def embedding(node: Node, shapes: Shapes) -> Finish:
    """Operand 0: the table [V, n]. torch returns a missing padding_idx as -1 in unsigned 64 bits."""
    _refuse_frequencies(node)
    return _lookup(node._saved_indices, shapes[0], node._saved_padding_idx)


@register("IndexSelectBackward0")
def index_select(node: Node, shapes: Shapes) -> Finish:
    """table.index_select(0, ids)."""
    if node._saved_dim != 0:
        raise RuleDoesNotApply("index_select along another axis than the rows")
    return _lookup(node._saved_index, shapes[0])


@register("IndexBackward0")
def index(node: Node, shapes: Shapes) -> Finish:
    """table[ids]."""
    first, *others = node._saved_indices
    if first is None or others or first.dtype == torch.bool:
        raise RuleDoesNotApply("an index other than rows of a table")
    return _lookup(first, shapes[0])


def _lookup(ids: Tensor, table: torch.Size, padding: int | None = None) -> Finish:
    V = table[0]

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        if layout.axis >= ids.dim():
            raise RuleDoesNotApply("the examples lie along a row of the table")
        owner = layout.broadcast(layout.owners(ids.device), ids.dim())
        owner_N, ids_N = owner.expand_as(ids).flatten(), ids.flatten()
        g_Nn = at_least_float32(g).reshape(len(ids_N), -1)
        if isinstance(layout, Ragged):  # some positions may have no owner
            kept_N = owner_N >= 0
            owner_N, ids_N, g_Nn = owner_N[kept_N], ids_N[kept_N], g_Nn[kept_N]
        if padding is not None and padding < V:
            g_Nn = g_Nn.masked_fill((ids_N == padding)[:, None], 0)
        each = None if isinstance(layout, Ragged) else len(ids_N) // layout.batch
        ids_N = torch.where(ids_N < 0, ids_N + V, ids_N)
        return {0: Rows(owner_N, ids_N, g_Nn, layout.batch, table, each)}

    return finish


@register("EmbeddingBagBackward0")
def embedding_bag(node: Node, shapes: Shapes) -> Finish:
    """Operand 0: the table [V, n]. A bag is a row of the output and belongs to one example."""
    _refuse_frequencies(node)
    if set(shapes) != {0}:
        raise RuleDoesNotApply("the weights of the positions are computed from parameters")
    mode, table = node._saved_mode, shapes[0]
    ids_N, largest_Gn = node._saved_indices, node._saved_result3
    weight_N: Tensor | None = node._saved_per_sample_weights
    counted_N = ids_N != node._saved_padding_idx
    positions = torch.arange(len(ids_N), device=ids_N.device)
    # Position k lies in the last bag that begins at or before k; an empty bag begins where the next one does.
    bag_N = torch.searchsorted(node._saved_offsets, positions, right=True) - 1

    def finish(g: Tensor, layout: Layout) -> dict[int, Form]:
        require_axis(layout, 0)
        g_Gn, owner_G = at_least_float32(g), layout.owners(ids_N.device)
        kept_N = counted_N & (owner_G[bag_N] >= 0)
        ids_K, bag_K = ids_N[kept_N], bag_N[kept_N]
        size_G = torch.bincount(bag_K, minlength=len(g_Gn))
        if mode == _MAX:
            full_G = size_G > 0
            return {0: _largest(g_Gn[full_G], largest_Gn[full_G], owner_G[full_G], layout.batch, table)}
        g_Kn = g_Gn[bag_K]
        if mode == _MEAN:
            g_Kn = g_Kn / size_G[bag_K, None]
        if weight_N is not None:
            g_Kn = g_Kn * weight_N[kept_N, None]
        return {0: Rows(owner_G[bag_K], ids_K, g_Kn, layout.batch, table)}

    return finish


def _largest(g_Gn: Tensor, ids_Gn: Tensor, owner_G: Tensor, batch: int, table: torch.Size) -> Rows:
    """In max mode each entry of a bag selects its own row: the table as V * n rows of one entry."""
    G, n = g_Gn.shape
    place_Gn = ids_Gn * n + torch.arange(n, device=ids_Gn.device)
    return Rows(owner_G.repeat_interleave(n), place_Gn.flatten(), g_Gn.reshape(G * n, 1), batch, table)


def _refuse_frequencies(node: Node) -> None:
    if node._saved_scale_grad_by_freq:
        raise CoupledExamplesError(
            "An embedding has scale_grad_by_freq=True: it divides an example's gradient by the frequency of its ids "
            "in the whole batch. Set scale_grad_by_freq=False."
        )
