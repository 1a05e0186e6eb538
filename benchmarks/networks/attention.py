"""Attention blocks, a vision transformer and GPT-2 small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import Images, Tokens


class SelfAttention(nn.Module):
    """Multi-head attention as four linear layers: query, key, value and output."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads, causal)
        self.norm_2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        x = x + self.attention(self.norm_1(x))
        return x + self.feed(self.norm_2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """ViT-B/16: patches of 16 x 16, a class token, 12 blocks of width 768."""

    def __init__(self, images: Images, *, patch: int = 16, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(images.channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (images.size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, images.classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1)
        return self.head(self.norm(self.blocks(tokens + self.positions))[:, 0])  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 small: 12 causal blocks of width 768; the output layer is the embedding again. No dropout.

    With `tied=False` the output layer has weights of its own.
    """

    def __init__(
        self, tokens: Tokens, *, width: int = 768, depth: int = 12, heads: int = 12, tied: bool = True
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(tokens.vocabulary, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens.length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, tokens.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, vocabulary)."""
        x = self.norm(self.blocks(self.words(ids) + self.positions))
        return F.linear(x, self.words.weight) if self.head is None else self.head(x)  # type: ignore[no-any-return]
