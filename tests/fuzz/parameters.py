"""Blocks of bare parameters, functional calls, and computed or shared weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clipwise.layers import linear_cross_entropy
from tests.fuzz.block import Block, Shape, block


def parameter(*shape: int) -> nn.Parameter:
    """A bare parameter of moderate size."""
    return nn.Parameter(0.7 * torch.randn(shape))


@block()
class ClassToken(Block):
    always = ("class token",)

    def build(self, shape: Shape) -> None:
        self.token = parameter(1, 1, shape.width)
        self.out = Shape(shape.length + 1, shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(h), -1, -1), h], 1)


@block()
class RepeatedToken(Block):
    """One token, repeated for every example."""

    always = ("repeated token",)

    def build(self, shape: Shape) -> None:
        self.token = parameter(1, shape.width)
        self.out = Shape(shape.length + 2, shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([h, self.token.repeat(len(h), 2, 1)], 1)


@block()
class PositionTable(Block):
    always = ("position table",)

    def build(self, shape: Shape) -> None:
        self.table = parameter(shape.length + self.dice.randint(0, 2), shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table[: h.shape[1]]


@block()
class PositionIds(Block):
    """Positions looked up once for the whole batch."""

    always = ("position ids",)

    def build(self, shape: Shape) -> None:
        self.table = nn.Embedding(shape.length + 1, shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table(torch.arange(h.shape[1])[None])


@block()
class Chosen(Block):
    """Parameters at positions that the data choose."""

    always = ("chosen by the data",)

    def build(self, shape: Shape) -> None:
        self.low, self.high, self.value = parameter(shape.width), parameter(shape.width), parameter()

    def forward(self, h: Tensor) -> Tensor:
        h = torch.where(h < -0.3, self.low, h) + self.high.masked_fill(h > 0.2, 0.1)
        return h.masked_fill(h > 1.0, self.value)


@block()
class LayerScale(Block):
    always = ("layer scale",)

    def build(self, shape: Shape) -> None:
        self.scale = parameter(shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


@block()
class InPlaceScale(Block):
    always = ("scale in place",)

    def build(self, shape: Shape) -> None:
        self.scale = parameter(shape.width)

    def forward(self, h: Tensor) -> Tensor:
        z = h.sin()
        z *= self.scale
        return z


@block()
class Temperature(Block):
    always = ("temperature",)

    def build(self, shape: Shape) -> None:
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, h: Tensor) -> Tensor:
        return h / self.temperature


@block()
class ChannelAffine(Block):
    """Scale and shift of one axis, with a minus sign."""

    always = ("channel affine",)

    def build(self, shape: Shape) -> None:
        self.scale, self.shift = parameter(shape.length, 1), parameter(shape.length, 1)

    def forward(self, h: Tensor) -> Tensor:
        return (h - self.shift) * self.scale


@block()
class FunctionalLinear(Block):
    always = ("F.linear",)

    def build(self, shape: Shape) -> None:
        width = self.dice.randint(1, 4)
        self.weight = parameter(width, shape.width)
        self.bias = parameter(width) if self.dice.random() < 0.5 else None
        self.out = Shape(shape.length, width)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)


@block()
class FunctionalConvolution(Block):
    always = ("F.conv1d",)

    def build(self, shape: Shape) -> None:
        self.weight = parameter(3, shape.width, 3)
        self.out = Shape(shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        return F.conv1d(h.transpose(1, 2), self.weight, padding=1).transpose(1, 2)


@block()
class FunctionalNorm(Block):
    always = ("F.layer_norm",)

    def build(self, shape: Shape) -> None:
        self.weight, self.bias = parameter(shape.width), parameter(shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], self.weight, self.bias, eps=1e-2)


@block(1.5)
class Einsum(Block):
    """One product for all heads."""

    always = ("einsum",)
    maybe = ("einsum heads",)

    def build(self, shape: Shape) -> None:
        heads = 2 if self.sometimes("einsum heads", 0.6) else 0
        self.weight = parameter(*[heads] * bool(heads), shape.width, 2)
        self.out = Shape(shape.length, 2 * max(heads, 1))

    def forward(self, h: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return torch.einsum("btd,dk->btk", h, self.weight)
        return torch.einsum("btd,hdk->bthk", h, self.weight).flatten(2)


@block(2.5)
class Matmul(Block):
    always = ("matmul",)
    maybe = ("matmul from the left", "matmul without positions")

    def build(self, shape: Shape) -> None:
        self.left = self.sometimes("matmul from the left", 0.4)
        self.flat = not self.left and self.sometimes("matmul without positions", 0.7)
        self.weight = parameter(shape.width, 3)
        self.out = Shape(1 if self.flat else shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        if self.left:  # the examples are columns
            return (self.weight.t() @ h.flatten(0, 1).t()).t().unflatten(0, h.shape[:2])
        if self.flat:
            return (h.mean(1) @ self.weight)[:, None]
        return h @ self.weight


@block()
class Addmm(Block):
    """Rows of all positions in one product, with factors."""

    always = ("addmm",)

    def build(self, shape: Shape) -> None:
        self.weight, self.bias = parameter(shape.width, 3), parameter(3)
        self.out = Shape(shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        made = torch.addmm(self.bias, h.flatten(0, 1), self.weight, beta=0.5, alpha=2.0)
        return made.unflatten(0, h.shape[:2])


@block()
class StackOfWeights(Block):
    """A stack of weights times a stack of rows of all examples."""

    always = ("bmm",)

    def build(self, shape: Shape) -> None:
        self.weight = parameter(2, shape.width, 2)
        self.out = Shape(shape.length, 4)

    def forward(self, h: Tensor) -> Tensor:
        rows = torch.stack([h.flatten(0, 1), h.flatten(0, 1).sin()])
        made = torch.bmm(rows, self.weight)
        return torch.cat([made[0], made[1]], 1).unflatten(0, h.shape[:2])


@block()
class CrossEntropy(Block):
    """An output layer with cross entropy, whose logits are not stored. The losses of the positions are the state."""

    always = ("tiled cross entropy",)

    def build(self, shape: Shape) -> None:
        self.weight = parameter(5, shape.width)
        self.bias = parameter(5) if self.dice.random() < 0.5 else None
        self.out = Shape(shape.length, 1)

    def forward(self, h: Tensor) -> Tensor:
        targets = (torch.arange(h.shape[1], device=h.device) % 5).expand(h.shape[:2])
        return linear_cross_entropy(h, self.weight, targets, self.bias)[..., None]


class LowRank(nn.Module):
    """W + up down, where W is frozen: an adapter as a parametrization."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = parameter(rows, 1), parameter(1, columns)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@block()
class Adapted(Block):
    always = ("parametrized", "low-rank adapter")

    def build(self, shape: Shape) -> None:
        self.layer = nn.Linear(shape.width, 3)
        parametrize.register_parametrization(self.layer, "weight", LowRank(3, shape.width))
        self.layer.parametrizations.weight.original.requires_grad_(False)
        self.out = Shape(shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


@block()
class MaskedWeight(Block):
    """A weight computed from a parameter and a constant."""

    always = ("masked weight",)

    def build(self, shape: Shape) -> None:
        self.weight = parameter(3, shape.width)
        self.register_buffer("mask", (torch.arange(3 * shape.width).view(3, -1) % 2).float())
        self.out = Shape(shape.length, 3)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight * self.mask)


@block()
class PackedWeight(Block):
    """One weight, split into pieces that are used separately."""

    always = ("packed weight",)

    def build(self, shape: Shape) -> None:
        self.weight = parameter(6, shape.width)
        self.out = Shape(shape.length, 2)

    def forward(self, h: Tensor) -> Tensor:
        a, b, c = self.weight.chunk(3)
        return F.linear(h, a).tanh() * F.linear(h, b) + F.linear(h, c)


@block(1.2)
class SharedWeight(Block):
    """Two modules, one weight: of the same kind, of two kinds, or one of them transposed."""

    always = ("shared weight",)

    def build(self, shape: Shape) -> None:
        self.kind = self.dice.choice(["linear", "convolution", "transposed"])
        width = shape.width
        self.first = nn.Linear(width, width)
        self.second = nn.Conv1d(width, width, 1) if self.kind == "convolution" else nn.Linear(width, width)
        if self.kind == "linear":
            self.second.weight = self.first.weight
        else:
            del self.second.weight

    def forward(self, h: Tensor) -> Tensor:
        a = self.first(h).tanh()
        if self.kind == "linear":
            return self.second(a)
        if self.kind == "transposed":
            return F.linear(a, self.first.weight.t(), self.second.bias)
        kernel = self.first.weight[:, :, None]
        return F.conv1d(a.transpose(1, 2), kernel, self.second.bias).transpose(1, 2)
