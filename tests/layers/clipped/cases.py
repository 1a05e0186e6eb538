"""Layers to clip with suitable inputs, for tests of all clipped layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipwise.layers import ClippedLayer, clip_inputs

EXAMPLES = 4


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one example
    ids: int = 0  # the number of ids, if inputs are ids
    axis: int = 0  # of the examples


class Attended(nn.Module):
    """Self-attention, as a function of one input."""

    def __init__(self, need_weights: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, bias=bias)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x.flip(1), x.tanh(), need_weights=self.need_weights)[0]
        return y


class Run(nn.Module):
    """A recurrent layer as a function of one input to one output, the concatenation of all results."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.run = kind(3, 4, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.run(x)
        last = last if isinstance(last, Tensor) else torch.cat(last)
        y = y if getattr(self.run, "layer", self.run).batch_first else y.transpose(0, 1)
        return torch.cat([y.flatten(1), last.transpose(0, 1).flatten(1)], 1)


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": Case(lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear over positions": Case(lambda: nn.Linear(5, 3), (4, 5)),
    "linear over a grid": Case(lambda: nn.Linear(5, 3), (2, 3, 5)),
    "conv1d": Case(lambda: nn.Conv1d(2, 3, 3), (2, 8)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "conv3d": Case(lambda: nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "padding": Case(lambda: nn.Conv2d(2, 3, 3, padding=(2, 1)), (2, 5, 5)),
    "same padding, even kernel": Case(lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 5)),
    "stride": Case(lambda: nn.Conv2d(2, 3, 4, stride=(2, 3), padding=1), (2, 8, 8)),
    "dilation": Case(lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2), (2, 7, 6)),
    "stride and dilation": Case(lambda: nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=3), (2, 9)),
    "groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "depthwise": Case(lambda: nn.Conv2d(3, 3, 3, groups=3), (3, 5, 5)),
    "circular": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "circular, kernel beyond the input": Case(
        lambda: nn.Conv2d(1, 2, 5, padding=3, padding_mode="circular"), (1, 3, 3)
    ),
    "reflect": Case(lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 5, 5)),
    "replicate": Case(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 5)),
    "embedding": Case(lambda: nn.Embedding(5, 3), (6,), ids=5),
    "embedding with padding": Case(lambda: nn.Embedding(5, 3, padding_idx=1), (2, 3), ids=5),
    "layer norm": Case(lambda: nn.LayerNorm(6), (6,)),
    "layer norm over positions": Case(lambda: nn.LayerNorm((2, 3)), (4, 2, 3)),
    "group norm": Case(lambda: nn.GroupNorm(2, 6), (6, 3, 2)),
    "group norm without positions": Case(lambda: nn.GroupNorm(2, 6), (6,)),
    "attention": Case(lambda: Attended(), (5, 6)),
    "attention with weights": Case(lambda: Attended(need_weights=True, bias=False), (5, 6)),
    "rnn": Case(lambda: Run(nn.RNN, batch_first=True), (5, 3)),
    "rnn, relu": Case(lambda: Run(nn.RNN, nonlinearity="relu"), (5, 3), axis=1),
    "lstm": Case(lambda: Run(nn.LSTM, batch_first=True), (5, 3)),
    "lstm, two layers, both ways": Case(
        lambda: Run(nn.LSTM, batch_first=True, num_layers=2, bidirectional=True), (4, 3)
    ),
    "gru": Case(lambda: Run(nn.GRU, batch_first=True), (5, 3)),
    "gru without bias": Case(lambda: Run(nn.GRU, bias=False), (5, 3), axis=1),
}


def inputs(case: Case, examples: int = EXAMPLES, scale: float = 1.0, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if case.ids:
        return torch.randint(0, case.ids, (examples, *case.shape), generator=random)
    x = scale * torch.randn(examples, *case.shape, generator=random, dtype=torch.float64)
    return x.transpose(0, 1).contiguous() if case.axis else x


def clipped(case: Case, seed: int = 0, **options: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.build().double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)
    return clip_inputs(model, **{"input_norm": 1.5, "grad_norm": 0.7, **options})  # type: ignore[arg-type]


def bounds(model: nn.Module) -> dict[str, float]:
    """The bound per example of each parameter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ClippedLayer):
            prefix = f"{name}.layer." if name else "layer."
            found.update({prefix + local: bound for local, bound in module.bounds().items()})
    return {name: found[name] for name, _ in model.named_parameters()}
