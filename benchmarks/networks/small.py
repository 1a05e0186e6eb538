"""The paper's small networks: MLP, CNN, RNN, LSTM and a Transformer with one encoder block."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.networks.attention import Block
from benchmarks.shapes import Images, Tokens

HIDDEN = 128  # units of a recurrent layer and of the CNN's fully connected layer
WORD = 200  # length of a word vector, as GloVe's in the paper


def mlp(images: Images, depth: int = 2) -> nn.Module:
    """`depth` hidden layers with sigmoid: 128 units, then 256 in every further one.

    The paper gives these widths for two hidden layers, and none for more.
    """
    widths = [images.pixels, 128] + [256] * (depth - 1)
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], images.classes))


def even_mlp(images: Images, depth: int, width: int) -> nn.Module:
    """`depth` hidden layers of one width, with ReLU."""
    widths = [images.pixels] + [width] * depth
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, images.classes))


def cnn(images: Images) -> nn.Module:
    """Two 5 x 5 convolutions (20 and 50 kernels), each followed by a pool, and 128 hidden units."""
    side = ((images.size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(images.channels, 20, 5),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * side**2, HIDDEN),
        nn.Sigmoid(),
        nn.Linear(HIDDEN, images.classes),
    )


class RowReader(nn.Module):
    """Reads an image row by row with a recurrent layer and classifies the last state."""

    def __init__(self, images: Images, layer: type[nn.RNN] | type[nn.LSTM]) -> None:
        super().__init__()
        self.recurrent = layer(images.channels * images.size, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, images.classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) images as (B, H, C W) sequences."""
        states, _ = self.recurrent(x.transpose(1, 2).flatten(2))
        return self.head(states[:, -1])  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Frozen random word vectors (the paper: GloVe), sine positions, one encoder block, a linear layer on the mean."""

    def __init__(self, tokens: Tokens, heads: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(tokens.vocabulary, WORD).requires_grad_(False)
        self.register_buffer("positions", _sines(tokens.length, WORD), persistent=False)
        self.block = Block(WORD, heads, 4 * WORD)
        self.head = nn.Linear(WORD, tokens.classes)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, classes)."""
        return self.head(self.block(self.words(ids) + self.positions).mean(1))  # type: ignore[no-any-return]


def _sines(length: int, width: int) -> Tensor:
    """sin and cos of t / 10000^(2i / width), side by side."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
