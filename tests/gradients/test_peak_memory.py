"""What is never written out: positions by positions, examples by vocabulary by features, and gradients of views.

Tensors are followed from the outside, by their storages.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipwise.gradients import Memory, forms, per_example_gradients
from clipwise.gradients.forms import base, head
from clipwise.layers import linear_cross_entropy, standardize_weights
from tests.gradients.cases import trainable

FLOAT = 4  # bytes


class Alive(TorchDispatchMode):
    """The largest number of bytes of tensors alive at once, and the largest tensor, of those made in the block."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most_bytes, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, Tensor):
                self._follow(t.untyped_storage())
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))
        return found

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            weakref.finalize(storage, self._sizes.pop, place, None)


@pytest.fixture(autouse=True)
def _no_reused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reused blocks stay alive between steps. Pieces of written gradients are small here."""
    monkeypatch.setattr(base._blocks, "_most", 0)
    base._blocks.clear()
    for place in ("forms.outer._PIECE_BYTES", "forms.base.CHUNK_BYTES"):
        monkeypatch.setattr(f"clipwise.gradients.{place}", 1 << 15)
    monkeypatch.setattr("clipwise.gradients.examples.KEEP_BYTES", 0)


def followed(model: nn.Module, *inputs: Tensor, views: int = 1) -> Alive:
    """Norms and sums of a batch whose graph is known."""
    memory = Memory()
    for step in range(4):
        with Alive() as alive:
            losses = model(*inputs)
            losses = losses.view(-1, views).mean(1)
            found = per_example_gradients(losses, trainable(model), memory)
            weights_B = torch.ones(len(losses), dtype=torch.float64)
            found.weighted_sums(dict.fromkeys(found.squared_norms(), weights_B))
        if step < 3:
            del found, losses
    return alive


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x_BTd: Tensor) -> Tensor:
        return self.layer(x_BTd).square().sum((1, 2))


def test_long_sequences_need_no_table_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, d = 2, 1024, 16
    table = T * T * FLOAT
    x = torch.randn(B, T, d)
    assert followed(Positions(d), x).most_bytes < table / 2
    monkeypatch.setattr(forms.outer, "gram_is_cheaper", lambda *_: True)  # the test notices such a table
    assert followed(Positions(d), x).most_bytes > table


class Language(nn.Module):
    def __init__(self, words: int, width: int, tiled: bool) -> None:
        super().__init__()
        self.table, self.inner, self.tiled = nn.Embedding(words, width), nn.Linear(width, width), tiled

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.inner(self.table(ids_BT)).tanh()
        if self.tiled:
            return linear_cross_entropy(x, self.table.weight, ids_BT).sum(1)
        logits = F.linear(x, self.table.weight)
        return F.cross_entropy(logits.transpose(1, 2), ids_BT, reduction="none").sum(1)


def test_a_large_vocabulary_needs_neither_logits_nor_gradients_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, V, d = 16, 8, 4096, 16
    monkeypatch.setattr(head, "_WORDS", 128)
    monkeypatch.setattr(head, "TILE_BYTES", 1 << 15)
    monkeypatch.setattr("clipwise.layers.tiled_cross_entropy._width", lambda positions: 128)
    table, logits, gradients = V * d * FLOAT, B * T * V * FLOAT, B * V * d * FLOAT
    ids = torch.randint(V, (B, T))
    tiled, plain = (followed(Language(V, d, tiled), ids) for tiled in (True, False))
    assert tiled.largest <= table < logits
    assert tiled.most_bytes < 4 * table < min(logits, gradients)
    assert plain.most_bytes > logits


class Images(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(), nn.Flatten()
        )
        standardize_weights(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum(1)


@pytest.mark.parametrize("views", [8, 1])
def test_no_gradient_of_a_view_is_written_out(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of an example are positions of its gradient, also where the weight is derived from the parameter."""
    for place in ("examples._CACHED_BYTES", "forms.base.CHUNK_BYTES"):  # all examples at once
        monkeypatch.setattr(f"clipwise.gradients.{place}", 1 << 30)
    images, c = 32, 16
    gradient = 9 * c * c * FLOAT
    found = followed(Images(c), torch.randn(images, c, 4, 4), views=views)
    assert (found.largest < images * gradient / 4) == (views > 1)
