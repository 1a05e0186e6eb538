"""The models, inputs and losses for all tests of per-example gradients.

`CASES` has one entry per kind of operation or unusual shape. A model takes the inputs drawn by `inputs(batch)`, and
`losses` turns its output into one loss per example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from clipwise.layers import linear_cross_entropy

D = 5


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    fallback: bool = False  # whether this model is expected to use the fallback

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.model().to(dtype)

    def draw(self, batch: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in self.inputs(batch))


def losses(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One loss per example, from all of its outputs and from no other example's."""
    out = model(*inputs)
    flat = out.reshape(out.shape[0], -1)
    ramp = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * ramp).sum(1).tanh() + flat.square().mean(1)


def oracle(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A separate forward and backward pass for each example, in float64: [B, *shape]."""
    model = model.double()
    rows: dict[str, list[Tensor]] = {n: [] for n, p in model.named_parameters() if p.requires_grad}
    for i in range(len(inputs[0])):
        one = tuple(x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1] for x in inputs)
        grads = torch.autograd.grad(
            losses(model, one).sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
        for (name, p), g in zip(((n, p) for n, p in model.named_parameters() if p.requires_grad), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(g) for name, g in rows.items()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def vectors(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: (torch.randn(batch, *shape),)


def ids(length: int, vocabulary: int = 4) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name, p in model.named_parameters():
        if name in names:
            p.requires_grad_(False)
    return model


class Twice(nn.Module):
    """One module called twice, with different positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        return self.b(self.a(h) + self.a(x).sum(1, keepdim=True))


class Tied(nn.Module):
    """Embedding and output head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, D)
        self.head = nn.Linear(D, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


class TurnedHead(nn.Module):
    """Embedding and output head share a weight, transposed by one of several operations."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.turn = nn.Embedding(6, D), turn

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embedding(x)) @ self.turn(self.embedding.weight)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x.transpose(0, 1))).transpose(0, 1)


class Folded(nn.Module):
    """Frames of a clip as rows of a convolution: B*k images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x.flatten(0, 1))).tanh()
        return h.view(x.shape[0], x.shape[1], *h.shape[1:])


class FoldedChannels(nn.Module):
    """The same with many channels and few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(12, 20, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.flatten(0, 1)).tanh()
        return h.view(x.shape[0], x.shape[1], *h.shape[1:])


class BareParameters(nn.Module):
    """Class token, position table, layer scale, temperature, bias: no modules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(4, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return (h * self.scale - self.shift).tanh() / self.temperature


class PositionIds(nn.Module):
    """Position embeddings looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(6, D), nn.Embedding(8, D)

    def forward(self, x: Tensor) -> Tensor:
        return (self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device)[None])).tanh()


class LeftProduct(nn.Module):
    """The weight is the left factor and the examples are columns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, D))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w @ x.t()).tanh().t()


class Heads(nn.Module):
    """One weight per head, in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hdk->bthk", x, self.w).tanh()


class HeadsOnTheLeft(nn.Module):
    """A stack of weights times a stack of columns: the positions of all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3, D))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.flatten(0, 1).T.expand(2, -1, -1)
        return torch.bmm(self.w, columns).tanh().view(2, 3, *x.shape[:2]).permute(2, 3, 0, 1)


class Masked(nn.Module):
    """A weight made of a parameter and a constant: DERIVED, although it resembles a use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, D))
        self.register_buffer("mask", (torch.arange(3 * D).view(3, D) % 2).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w * self.mask).tanh()


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, D))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias).tanh()


class Chunked(nn.Module):
    """One packed weight, split into parts that are used separately."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed.chunk(3)
        return F.linear(x, q).tanh() * F.linear(x, k).sigmoid() + F.linear(x, v)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        z *= self.w
        return z.relu_() + z


class Branches(nn.Module):
    """Two inputs, a residual, a frozen layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x) + y
        return self.c(h + self.b(h.tanh()))


class SquaredDistance(torch.autograd.Function):
    """A custom operation without a rule."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x[..., None, :] - w).square().sum(-1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        d = 2 * g[..., None] * (x[..., None, :] - w)
        return d.sum(-2), -d.sum(tuple(range(d.dim() - 2)))


class Scale(torch.autograd.Function):
    """A custom operation: x * w for w of shape [n]."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0)


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(D, 3), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return SquaredDistance.apply(self.a(x), self.w)


class Recurrent(nn.Module):
    """All outputs of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cell = kind(D, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class States(nn.Module):
    """A recurrent layer with initial states from the data; its last states are used as well."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cell = kind(D, 4, **options)
        self.first = nn.Linear(D, 4)
        proj = getattr(self.cell, "proj_size", 0)
        self.project = nn.Linear(4, proj) if proj else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.cell.num_layers * (1 + self.cell.bidirectional)
        c = self.first(x.mean(1)).repeat(rows, 1, 1)  # cuDNN requires it to be contiguous
        h = self.project(c).tanh()
        out, last = self.cell(x.transpose(0, 1), (h, c) if isinstance(self.cell, nn.LSTM) else h)
        states = [s.transpose(0, 1).flatten(1) for s in (last if isinstance(last, tuple) else (last,))]
        return torch.cat([out.transpose(0, 1).flatten(1), *states], 1)


class OnlyLastState(nn.Module):
    """Only the last state of a recurrent layer is used, as in a classifier."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(D, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        last = self.cell(x)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


class Packed(nn.Module):
    """Sequences of different lengths, sorted and packed; the first entry of each sequence sets its length."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.cell = kind(D, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (1 + (x[:, 0, 0].abs() * 10).long() % x.shape[1]).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.cell(packed)
        padded = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]
        h = last[0] if isinstance(last, tuple) else last
        return torch.cat([padded.flatten(1), h.transpose(0, 1).flatten(1)], 1)


class TimeFirstAttention(nn.Module):
    """Attention and its output projection run on T*B rows; a norm runs on [T, B, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(6, 2), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.transpose(0, 1))
        return (h + self.attention(h, h, h, need_weights=False)[0]).transpose(0, 1)


class Checkpointed(nn.Module):
    """The middle part is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(D, D), nn.Linear(D, 2)
        self.b = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.b, self.a(x), use_reentrant=False))


class Bags(nn.Module):
    """Two bags per example: all of its ids, and those of its first part, with padding and repeats."""

    def __init__(self, mode: str, weighted: bool = False, **options: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, D, mode=mode, **options)
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        weights = (x + 1.0).to(self.bag.weight.dtype) if self.weighted else None
        whole = self.bag(x, per_sample_weights=weights)
        flat = torch.cat([x[:, :2], x[:, 2:]], 1).flatten()
        number = torch.arange(2 * len(x), device=x.device)
        starts = number // 2 * x.shape[1] + 2 * (number % 2)
        if self.bag.include_last_offset:
            starts = torch.cat([starts, starts.new_tensor([len(flat)])])
        parts = self.bag(flat, starts, per_sample_weights=None if weights is None else weights.flatten())
        return (torch.cat([whole, parts.view(len(x), -1)], 1)).tanh()


class TwoSides(nn.Module):
    """A bilinear form of two parts of the input."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.form = nn.Bilinear(2, 3, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x[..., :2], x[..., 2:5]).tanh()


class Attention(nn.Module):
    """MultiheadAttention with keys and values of other sizes, masks, and a learned extra position."""

    def __init__(self, other: int = 6, masked: bool = False, **options: object) -> None:
        super().__init__()
        sizes = {} if other == 6 else {"kdim": other, "vdim": other}
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **sizes, **options)
        self.other, self.masked = other, masked

    def forward(self, x: Tensor) -> Tensor:
        memory = x[..., : self.other] if self.other <= 6 else torch.cat([x, x[..., : self.other - 6]], -1)
        T = x.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1) if self.masked else None
        return x + self.attention(x, memory, memory, attn_mask=causal)[0]


class ConvOfTransformers(nn.Module):
    """The linear layer of GPT-2: addmm with a weight [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(*x.shape[:-1], 3).tanh()


class Experts(nn.Module):
    """The data send every position to one of two experts; an expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros(*x.shape[:2], 3, dtype=x.dtype, device=x.device)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = expert(x[mine]) * weight[mine][:, None]
        return out


class TiledHead(nn.Module):
    """The cross entropy of an output layer, whose logits are not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, 7)

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return linear_cross_entropy(self.body(x).tanh(), self.head.weight, targets, self.head.bias)


class SortedByLength(nn.Module):
    """Rows are sorted by a data value, run through layers, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cell = nn.Linear(D, D), nn.LSTM(D, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return self.cell(self.a(x[order]).tanh())[0][order.argsort()]


class Table(nn.Module):
    """A table indexed without nn.Embedding, and an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.randn(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,dn->btn", self.table[x].tanh(), self.w)


class Decoder(nn.Module):
    """A decoder layer that attends to its own input, time-first internally."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1)
        return self.layer(h, h.flip(0)).transpose(0, 1)


class Evaluated(nn.Module):
    """Spectral norm with a fixed power iteration, so that two passes agree."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Chosen(nn.Module):
    """Parameters selected by the data: torch.where, masked_fill with a number and with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(D)) for _ in range(3))
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.where(x > 0, self.a, x) + torch.where(x > 0.5, x, self.b)
        return h + self.c.masked_fill(x < 0, 0) + x.masked_fill(x > 1, self.value)


class SharedWeight(nn.Module):
    """Two modules share one weight; each has its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def _conv(kind: type[nn.Module], spatial: tuple[int, ...], **options: object) -> Case:
    channels = 4 if options.get("groups", 1) == 2 else (3 if options.get("groups", 1) == 3 else 2)
    out = {1: 3, 2: 6, 3: 6}[int(options.get("groups", 1))]  # type: ignore[call-overload]
    name = f"{kind.__name__} {options}"
    return Case(name, lambda: nn.Sequential(kind(channels, out, **options), nn.Tanh()), vectors(channels, *spatial))


_CONVOLUTIONS = [
    _conv(nn.Conv1d, (9,), kernel_size=3),
    _conv(nn.Conv1d, (9,), kernel_size=4, stride=2, padding=1, dilation=2, bias=False),
    _conv(nn.Conv1d, (9,), kernel_size=3, padding=2, padding_mode="circular"),
    _conv(nn.Conv2d, (6, 5), kernel_size=3, padding=1),
    _conv(nn.Conv2d, (6, 5), kernel_size=(3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2), groups=2),
    _conv(nn.Conv2d, (6, 5), kernel_size=3, groups=3, padding="same"),
    _conv(nn.Conv2d, (6, 5), kernel_size=2, padding="same"),
    _conv(nn.Conv2d, (6, 5), kernel_size=3, padding=1, padding_mode="reflect"),
    _conv(nn.Conv2d, (6, 5), kernel_size=3, padding=1, padding_mode="replicate"),
    _conv(nn.Conv2d, (6, 5), kernel_size=1, stride=3),
    _conv(nn.Conv3d, (4, 4, 3), kernel_size=2, stride=2, padding=1, groups=2),
]

_RECURRENT = [
    Case(
        f"{kind.__name__} {model.__name__} {options or ''}".strip().lower(),
        lambda kind=kind, model=model, options=options: model(kind, **options),  # type: ignore[misc]
        vectors(3, D),
    )
    for kind in (nn.RNN, nn.LSTM, nn.GRU)
    for model, options in (
        (Recurrent, {}),
        (Recurrent, {"bias": False}),
        (Recurrent, {"num_layers": 2, "bidirectional": True}),
        (States, {"num_layers": 2}),
        (OnlyLastState, {}),
        (Packed, {}),
        (Packed, {"bidirectional": True, "num_layers": 2}),
        *(((States, {"proj_size": 2}), (Packed, {"proj_size": 2})) if kind is nn.LSTM else ()),
        *(((Recurrent, {"nonlinearity": "relu"}),) if kind is nn.RNN else ()),
    )
]

_WINDOWS = [
    Case(
        f"{kind.__name__} of few positions {options}",
        lambda kind=kind, options=options: nn.Sequential(kind(12, 20, **options), nn.Tanh()),  # type: ignore[misc]
        vectors(12, *spatial),
    )
    for kind, spatial, options in (
        (nn.Conv1d, (5,), {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}),
        (nn.Conv2d, (3, 2), {"kernel_size": 3, "padding": 1}),
        (nn.Conv2d, (4, 3), {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 1), "dilation": (1, 1)}),
        (nn.Conv3d, (2, 2, 3), {"kernel_size": 2, "padding": (0, 1, 0), "bias": False}),
    )
]

CASES = [
    Case("linear", lambda: nn.Linear(D, 3), vectors(D)),
    Case("linear no bias", lambda: nn.Linear(D, 3, bias=False), vectors(D)),
    Case("linear positions", lambda: nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 2)), vectors(7, D)),
    Case("linear positions no bias", lambda: nn.Linear(D, 3, bias=False), vectors(7, D)),
    Case("linear gram", lambda: nn.Linear(40, 30), vectors(2, 40)),
    Case("linear two middle", lambda: nn.Linear(D, 3), vectors(2, 3, D)),
    Case("linear three middle", lambda: nn.Linear(D, 3), vectors(2, 1, 3, D)),
    Case("linear square", lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), vectors(6, D)),
    Case("linear time first", TimeFirst, vectors(6, D)),
    Case("linear frozen weight", lambda: frozen(nn.Linear(D, 3), "weight"), vectors(4, D)),
    Case("linear frozen bias", lambda: frozen(nn.Linear(D, 3), "bias"), vectors(4, D)),
    Case("left product", LeftProduct, vectors(D)),
    *_CONVOLUTIONS,
    *_WINDOWS,
    Case("conv folded of few positions", lambda: FoldedChannels(), vectors(3, 12, 2, 2)),
    Case(
        "conv frozen weight", lambda: nn.Sequential(frozen(nn.Conv2d(2, 3, 3), "weight"), nn.Tanh()), vectors(2, 5, 5)
    ),
    Case("conv folded", Folded, vectors(3, 2, 5, 5)),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(4, D), nn.Tanh()), ids(6)),
    Case("embedding padding", lambda: nn.Sequential(nn.Embedding(4, D, padding_idx=1), nn.Tanh()), ids(6)),
    Case("embedding 2-D ids", lambda: nn.Sequential(nn.Embedding(4, D)), lambda b: (torch.randint(0, 4, (b, 3, 2)),)),
    Case("position ids", PositionIds, ids(5)),
    Case("layer norm", lambda: nn.Sequential(nn.LayerNorm(D), nn.Tanh()), vectors(4, D)),
    Case("layer norm 2-D", lambda: nn.Sequential(nn.LayerNorm((4, D)), nn.Tanh()), vectors(3, 4, D)),
    Case("layer norm no bias", lambda: nn.Sequential(nn.LayerNorm(D, bias=False), nn.Tanh()), vectors(D)),
    Case("group norm", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh()), vectors(4, 3, 3)),
    Case("group norm flat", lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.Tanh()), vectors(6)),
    Case("instance norm 1d", lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.Tanh()), vectors(3, 5)),
    Case("instance norm 2d", lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.Tanh()), vectors(3, 4, 4)),
    Case("instance norm 3d", lambda: nn.Sequential(nn.InstanceNorm3d(2, affine=True), nn.Tanh()), vectors(2, 3, 2, 2)),
    Case("rms norm", lambda: nn.Sequential(nn.RMSNorm(D), nn.Tanh()), vectors(4, D)),
    Case("batch norm frozen", lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Tanh()).eval(), vectors(3, 4, 4)),
    Case("twice", Twice, vectors(4, D)),
    Case("tied", Tied, ids(5, 6)),
    *(
        Case(f"tied by {name}", lambda turn=turn: TurnedHead(turn), ids(5, 6))
        for name, turn in {
            "T": lambda w: w.T,
            "mT": lambda w: w.mT,
            "transpose": lambda w: w.transpose(0, 1),
            "permute": lambda w: w.permute(-1, 0),
        }.items()
    ),
    Case("bare parameters", BareParameters, vectors(3, D)),
    Case("masked", Masked, vectors(D)),
    Case("low rank", LowRank, vectors(4, D)),
    Case("chunked", Chunked, vectors(3, D)),
    Case("in place", InPlace, vectors(D)),
    Case("branches", Branches, lambda b: (torch.randn(b, 4, D), torch.randn(b, 1, D))),
    Case("weight norm", lambda: parametrizations.weight_norm(nn.Linear(D, 3)), vectors(2, D)),
    Case("encoder layer", lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), vectors(4, 6)),
    Case("attention time first", TimeFirstAttention, vectors(6, 6)),
    Case("checkpointed", Checkpointed, vectors(3, D)),
    *_RECURRENT,
    Case("embedding bag sum", lambda: Bags("sum"), ids(5, 6)),
    Case("embedding bag sum padding", lambda: Bags("sum", padding_idx=2), ids(5, 6)),
    Case("embedding bag weighted", lambda: Bags("sum", weighted=True, include_last_offset=True), ids(5, 6)),
    Case("embedding bag mean", lambda: Bags("mean", padding_idx=2), ids(5, 6)),
    Case("embedding bag max", lambda: Bags("max", padding_idx=2), ids(5, 6)),
    Case("bilinear", TwoSides, vectors(D)),
    Case("bilinear positions", lambda: TwoSides(bias=False), vectors(4, D)),
    Case("attention", Attention, vectors(4, 6)),
    Case("attention kdim vdim", lambda: Attention(4), vectors(4, 6)),
    Case("attention bias_k", lambda: Attention(add_bias_kv=True), vectors(4, 6)),
    Case("attention masked no bias", lambda: Attention(masked=True, bias=False), vectors(4, 6)),
    Case("decoder layer", Decoder, vectors(4, 6)),
    Case("addmm [in, out]", ConvOfTransformers, vectors(4, D)),
    Case("spectral norm", lambda: Evaluated(parametrizations.spectral_norm(nn.Linear(D, 3))), vectors(2, D)),
    Case("weight norm convolution", lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 3)), vectors(2, 6)),
    Case("experts", Experts, vectors(3, D)),
    Case("tiled cross entropy", TiledHead, vectors(6, D)),
    Case("sorted by length", SortedByLength, vectors(3, D)),
    Case("chosen by the data", Chosen, vectors(3, D)),
    Case("shared by two modules", SharedWeight, vectors(3, D)),
    Case("indexed table", Table, ids(3)),
    Case("custom function", Centers, vectors(2, D), fallback=True),
    Case("transposed convolution 1d", lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.Tanh()), vectors(2, 5)),
    Case(
        "transposed convolution 2d",
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 2, 2, stride=2, padding=1, groups=2, dilation=2), nn.Tanh()),
        vectors(4, 2, 2),
    ),
    Case("transposed convolution 3d", lambda: nn.ConvTranspose3d(2, 2, 2, bias=False), vectors(2, 2, 3, 2)),
    Case("prelu", lambda: nn.Sequential(nn.Linear(D, 4), nn.PReLU(), nn.Linear(4, 2)), vectors(3, D)),
    Case("prelu channels", lambda: nn.Sequential(nn.PReLU(3), nn.Tanh()), vectors(3, 4, 2)),
    Case("heads by einsum", Heads, vectors(4, D)),
    Case("heads on the left", HeadsOnTheLeft, vectors(4, D)),
]
