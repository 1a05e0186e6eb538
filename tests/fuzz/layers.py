"""Blocks around torch's own layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.block import Block, Shape, block

# A norm of one number, or of equal numbers, multiplies rounding by 1 / sqrt(eps), which is not tested here.
EPS = 1e-2


def image(h: Tensor, channels: int, axes: int) -> Tensor:
    """[B, T, w] -> [B, channels, *image_size] with one to three spatial axes and at least two points."""
    h = torch.cat([h, h.cos()], 1).transpose(1, 2)
    if axes == 1:
        h = h.mean(1)
    frequency = torch.arange(1, channels + 1, dtype=h.dtype).view(-1, *[1] * (h.dim() - 1))
    h = (h[:, None] * frequency).sin()
    return torch.stack([h, h.cos()], -1) if axes == 3 else h


def image_size(shape: Shape, axes: int) -> tuple[int, ...]:
    """The spatial axes of `image`."""
    return (2 * shape.length,) if axes == 1 else (shape.width, 2 * shape.length, 2)[:axes]


def randomized(norm: nn.Module) -> nn.Module:
    """Draw scale and shift. With a shift of 0, the norm of a single number would be 0."""
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


@block(4)
class Linear(Block):
    always = ("linear",)
    maybe = ("linear no bias", "linear no positions", "linear two middle axes")

    def build(self, shape: Shape) -> None:
        width = self.dice.randint(1, 5)
        bias = not self.sometimes("linear no bias", 0.4)
        self.flat = self.sometimes("linear no positions", 0.4)
        self.more = not self.flat and self.sometimes("linear two middle axes", 0.7)
        self.layer = nn.Linear(shape.length * shape.width if self.flat else shape.width, width, bias)
        self.out = Shape(1 if self.flat else shape.length, width)

    def forward(self, h: Tensor) -> Tensor:
        if self.flat:
            return self.layer(h.flatten(1))[:, None]
        if self.more:
            return self.layer(torch.stack([h, h.sin()], 2)).sum(2)
        return self.layer(h)


class AnyConvolution(Block):
    """Options for every spatial axis."""

    axes: int

    def options(self, size: tuple[int, ...]) -> dict[str, Any]:
        self.channels = self.dice.choice([1, 2, 4])
        options: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1}
        if self.sometimes("convolution stride"):
            options["stride"] = tuple(self.dice.randint(1, 2) for _ in size)
        if self.sometimes("convolution padding"):
            options["padding"] = (*(self.dice.randint(0, 1) for _ in size[1:]), 1)
        if self.sometimes("convolution dilation", 0.3):
            options["dilation"] = 2
        options["bias"] = not self.sometimes("convolution no bias", 0.3)
        if self.channels > 1 and self.sometimes("convolution groups"):
            options["groups"] = self.dice.choice([2, self.channels])
        self.made = options.get("groups", 1) * self.dice.randint(1, 2)
        self.out = Shape(self.made, 3)
        return options

    def forward(self, h: Tensor) -> Tensor:
        made = self.layer(image(h, self.channels, self.axes))
        return F.adaptive_avg_pool1d(made.flatten(2), 3)


class Convolution(AnyConvolution):
    always = ("convolution",)
    maybe = (
        "convolution stride", "convolution padding", "convolution dilation", "convolution no bias",
        "convolution groups", "convolution circular",
    )  # fmt: skip

    def build(self, shape: Shape) -> None:
        size = image_size(shape, self.axes)
        options = self.options(size)
        padding, reach = options["padding"], [(n - 1) // options["dilation"] + 1 for n in size]
        kernel = tuple(self.dice.randint(1, min(3, most)) for most in reach)
        if padding and self.sometimes("convolution circular", 0.7):
            options["padding_mode"] = "circular"
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.axes - 1]
        self.layer = kind(self.channels, self.made, kernel, **options)


@block()
class Convolution1d(Convolution):
    always = ("convolution", "convolution 1d")
    axes = 1


@block()
class Convolution2d(Convolution):
    always = ("convolution", "convolution 2d")
    axes = 2


@block()
class Convolution3d(Convolution):
    always = ("convolution", "convolution 3d")
    axes = 3


@block(1.5)
class TransposedConvolution(AnyConvolution):
    always = ("transposed convolution",)
    maybe = (
        "convolution stride", "convolution padding", "convolution dilation", "convolution no bias",
        "convolution groups", "transposed convolution output padding",
    )  # fmt: skip

    def build(self, shape: Shape) -> None:
        self.axes = self.dice.randint(1, 3)
        size = image_size(shape, self.axes)
        options = self.options(size)
        if self.sometimes("transposed convolution output padding", 0.7):
            options["stride"], options["output_padding"] = 2, 1
        kernel = tuple(3 if options["padding"] else self.dice.randint(1, 3) for _ in size)  # or nothing is left
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[self.axes - 1]
        self.layer = kind(self.channels, self.made, kernel, **options)


@block(1.5)
class LayerNorm(Block):
    always = ("layer norm",)
    maybe = ("layer norm over two axes", "layer norm no bias")

    def build(self, shape: Shape) -> None:
        over = tuple(shape) if self.sometimes("layer norm over two axes", 0.6) else shape.width
        bias = not self.sometimes("layer norm no bias", 0.6)
        self.layer = randomized(nn.LayerNorm(over, eps=EPS, bias=bias))

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


@block()
class RMSNorm(Block):
    always = ("rms norm",)

    def build(self, shape: Shape) -> None:
        self.layer = randomized(nn.RMSNorm(shape.width, eps=EPS))

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


@block()
class GroupNorm(Block):
    """At least two positions: torch refuses to normalise a single number."""

    always = ("group norm",)

    def build(self, shape: Shape) -> None:
        self.layer = randomized(nn.GroupNorm(self.divisor(shape.width), shape.width, eps=EPS))
        self.out = Shape(2 * shape.length, shape.width)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(torch.cat([h, h.cos()], 1).transpose(1, 2)).transpose(1, 2)


@block()
class InstanceNorm(Block):
    always = ("instance norm",)

    def build(self, shape: Shape) -> None:
        self.axes = self.dice.randint(1, 3)
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[self.axes - 1]
        self.layer = randomized(kind(2, eps=EPS, affine=True))
        self.out = Shape(2, 3)

    def forward(self, h: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(self.layer(image(h, 2, self.axes)).tanh().flatten(2), 3)


@block()
class FrozenBatchNorm(Block):
    """Batch norm with given statistics; its scale and shift are trained."""

    always = ("frozen batch norm",)

    def build(self, shape: Shape) -> None:
        self.layer = randomized(nn.BatchNorm1d(shape.width)).eval()
        self.layer.running_mean.normal_()
        self.layer.running_var.uniform_(0.5, 2)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(1, 2)).transpose(1, 2)


class Recurrent(Block):
    """Recurrent layers with random options and initial states."""

    kind: type[nn.RNNBase]
    maybe = (
        "recurrent several layers", "recurrent bidirectional", "recurrent time first", "recurrent no bias",
        "recurrent initial state",
    )  # fmt: skip

    def build(self, shape: Shape) -> None:
        hidden = self.dice.randint(2, 3)
        options = self.extra(hidden)
        layers = 2 if self.sometimes("recurrent several layers") else 1
        both = self.sometimes("recurrent bidirectional")
        self.time_first = self.sometimes("recurrent time first")
        self.layer = self.kind(
            shape.width,
            hidden,
            layers,
            bias=not self.sometimes("recurrent no bias", 0.3),
            bidirectional=both,
            batch_first=not self.time_first,
            **options,
        )
        states = layers * (2 if both else 1)
        width = options.get("proj_size", hidden)
        self.start = None
        if self.sometimes("recurrent initial state"):
            self.start = [(states, width)] + ([(states, hidden)] if self.kind is nn.LSTM else [])
        self.out = Shape(shape.length, width * (2 if both else 1))

    def extra(self, hidden: int) -> dict[str, Any]:
        """Options of this kind only."""
        return {}

    def initial(self, h: Tensor) -> Any:
        """States computed from the data, so that examples differ in them."""
        if self.start is None:
            return None
        mean_B = h.mean((1, 2))
        states = tuple((mean_B[None, :, None] + k).expand(n, -1, w).sin() for k, (n, w) in enumerate(self.start))
        return states if self.kind is nn.LSTM else states[0]

    def forward(self, h: Tensor) -> Tensor:
        if self.time_first:
            return self.layer(h.transpose(0, 1), self.initial(h))[0].transpose(0, 1)
        return self.layer(h, self.initial(h))[0]


@block(1.5)
class RNN(Recurrent):
    always = ("rnn",)
    maybe = (*Recurrent.maybe, "rnn relu")
    kind = nn.RNN

    def extra(self, hidden: int) -> dict[str, Any]:
        return {"nonlinearity": "relu" if self.sometimes("rnn relu", 0.7) else "tanh"}


@block(3)
class LSTM(Recurrent):
    always = ("lstm",)
    maybe = (*Recurrent.maybe, "lstm projection")
    kind = nn.LSTM

    def extra(self, hidden: int) -> dict[str, Any]:
        return {"proj_size": hidden - 1} if self.sometimes("lstm projection", 0.35) else {}


@block()
class GRU(Recurrent):
    always = ("gru",)
    kind = nn.GRU


@block()
class UnrolledCell(Block):
    """A recurrent cell, called once per position."""

    always = ("unrolled cell",)

    def build(self, shape: Shape) -> None:
        self.width = self.dice.randint(1, 3)
        self.cell = self.dice.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])(shape.width, self.width)
        self.out = Shape(shape.length, self.width)

    def forward(self, h: Tensor) -> Tensor:
        state, seen = None, []
        for at in h.unbind(1):
            state = self.cell(at, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen, 1)


@block(2.5)
class Attention(Block):
    always = ("attention",)
    maybe = (
        "attention time first", "attention kdim and vdim", "attention bias_k", "attention masked",
        "attention no bias", "attention with weights",
    )  # fmt: skip

    def build(self, shape: Shape) -> None:
        self.time_first = self.sometimes("attention time first")
        self.others = self.sometimes("attention kdim and vdim")
        self.weights = self.sometimes("attention with weights")
        self.masked = self.sometimes("attention masked")
        self.layer = nn.MultiheadAttention(
            shape.width,
            self.divisor(shape.width),
            bias=not self.sometimes("attention no bias"),
            add_bias_kv=self.sometimes("attention bias_k"),
            kdim=2 * shape.width if self.others else None,
            vdim=3 * shape.width if self.others else None,
            batch_first=not self.time_first,
        )

    def forward(self, h: Tensor) -> Tensor:
        key, value = h.sin(), h
        if self.others:
            key, value = torch.cat([h, h.sin()], 2), torch.cat([h, h.cos(), h.sin()], 2)
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1) if self.masked else None
        given = [h, key, value]
        if self.time_first:
            given = [t.transpose(0, 1) for t in given]
        made = self.layer(*given, attn_mask=mask, need_weights=self.weights)[0]
        return made.transpose(0, 1) if self.time_first else made


@block()
class EncoderLayer(Block):
    always = ("encoder layer",)

    def build(self, shape: Shape) -> None:
        self.time_first, first = self.dice.random() < 0.5, self.dice.random() < 0.5
        self.layer = nn.TransformerEncoderLayer(
            shape.width, self.divisor(shape.width), 5, dropout=0.0, activation=self.dice.choice(["relu", "gelu"]),
            layer_norm_eps=EPS, batch_first=not self.time_first, norm_first=first,
        )  # fmt: skip

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(0, 1)).transpose(0, 1) if self.time_first else self.layer(h)


@block(1.2)
class DecoderLayer(Block):
    always = ("decoder layer",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.TransformerDecoderLayer(
            shape.width, self.divisor(shape.width), 3, dropout=0.0, layer_norm_eps=EPS, batch_first=True
        )

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h, torch.cat([h, h.cos()], 1))


@block(1.3)
class PReLU(Block):
    always = ("prelu",)
    maybe = ("prelu slope a channel",)

    def build(self, shape: Shape) -> None:
        self.layer = nn.PReLU(shape.length if self.sometimes("prelu slope a channel", 0.8) else 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


@block(1.5)
class Bilinear(Block):
    always = ("bilinear",)
    maybe = ("bilinear no bias",)

    def build(self, shape: Shape) -> None:
        width = self.dice.randint(1, 3)
        self.layer = nn.Bilinear(shape.width, shape.width, width, bias=not self.sometimes("bilinear no bias", 0.7))
        self.out = Shape(shape.length, width)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h, h.cos())


@block(1.5)
class TimeFirst(Block):
    """A layer with inputs [length, B, width]."""

    always = ("time first",)

    def build(self, shape: Shape) -> None:
        width = shape.width
        norm = randomized(nn.LayerNorm(width, EPS))
        self.layer = self.dice.choice([nn.Linear(width, width), nn.Linear(width, width, bias=False), norm])

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(0, 1)).transpose(0, 1)


@block(2)
class Normalized(Block):
    """A layer with a torch parametrization of its weight."""

    always = ("parametrized",)
    maybe = ("weight norm", "spectral norm")

    def build(self, shape: Shape) -> None:
        layer = nn.Linear(shape.width, self.dice.randint(1, 4))
        self.out = Shape(shape.length, layer.out_features)
        if self.sometimes("weight norm"):
            self.layer = nn.utils.parametrizations.weight_norm(layer)
        else:
            self.traits.add("spectral norm")
            # In training mode every forward pass would change its power iteration.
            self.layer = nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=3).eval()

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)
