"""Small networks in which operations move rows or write in place, so that their layouts are hard to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, T, V, EXPERTS = 128, 32, 256, 4
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A network, `rows` examples for it, and one loss for each example."""

    model: nn.Module
    inputs: Callable[[int], Inputs]
    losses: Callable[[nn.Module, Inputs], Tensor]


def tokens(rows: int) -> Inputs:
    """Random ids, and classes."""
    return torch.randint(8, V, (rows, T)), torch.randint(0, 10, (rows,))


def vectors(rows: int) -> Inputs:
    """Random sequences of vectors, and classes."""
    return torch.randn(rows, T, D), torch.randint(0, 10, (rows,))


def images(rows: int) -> Inputs:
    """Random images, and classes."""
    return torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))


def class_losses(model: nn.Module, inputs: Inputs) -> Tensor:
    """Cross entropy of a classifier."""
    x, y = inputs
    return F.cross_entropy(model(x), y, reduction="none")


def gathered_losses(model: nn.Module, inputs: Inputs) -> Tensor:
    """The log likelihood of the next token, taken by `gather`."""
    ids, _ = inputs
    scores = model(ids)[:, :-1].log_softmax(-1)
    return -scores.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(1)


class Block(nn.Module):
    """The feed-forward half of a Transformer's block, with something in between."""

    def __init__(self, within: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(self.norm(x)))
        return x + self.second(h if self.within is None else self.within(h))


class Sequence(nn.Module):
    """Embedding, blocks and a head: a class for each example, or a token for each position."""

    def __init__(self, *within: Callable[[Tensor], Tensor] | None, head: int = 10, embeds: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if embeds else nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block(each) for each in within)
        self.head = nn.Linear(D, head)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h if self.head.out_features == V else h.mean(1))


class Experts(nn.Module):
    """A mixture of experts with the two best for each token."""

    def __init__(self, by_mask: bool = False) -> None:
        super().__init__()
        self.by_mask = by_mask
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        shares, chosen = self.gate(rows).softmax(-1).topk(2)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if self.by_mask:
                share = (shares * (chosen == number)).sum(-1, keepdim=True)
                total = total + share * expert(rows)
                continue
            place, which = torch.where(chosen == number)
            total.index_add_(0, place, expert(rows[place]) * shares[place, which, None])
        return x + total.view_as(x)


class Mixture(nn.Module):
    """Two layers of experts."""

    def __init__(self, by_mask: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(Experts(by_mask), nn.LayerNorm(D), Experts(by_mask))
        self.head = nn.Linear(D, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Merged(nn.Module):
    """Features of an image take the places of its tokens in a text, as in vision-language models."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, D, 8, 8), nn.Flatten(2))
        self.project = nn.Linear(D, D)
        self.text = Sequence(None, None, head=V)

    def forward(self, ids: Tensor, pictures: Tensor) -> Tensor:
        features = self.project(self.vision(pictures).mT)
        words = self.text.embedding(ids)
        h = words.masked_scatter((ids == 0)[..., None].expand_as(words), features)
        for block in self.text.blocks:
            h = block(h)
        return self.text.head(h)


def captioned(rows: int) -> Inputs:
    """Texts with 16 image tokens at random places, and images."""
    ids = torch.randint(8, V, (rows, T))
    for each in ids:
        each[torch.randperm(T)[:16]] = 0
    return ids, torch.randn(rows, 3, 32, 32)


def caption_losses(model: nn.Module, inputs: Inputs) -> Tensor:
    """Cross entropy of the next token."""
    ids, pictures = inputs
    return F.cross_entropy(model(ids, pictures)[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def convolutional(normalization: Callable[[int], nn.Module]) -> nn.Module:
    """Three convolutions, each with a normalization and an in-place ReLU."""
    widths = (3, 16, 32, 32)
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Conv2d(one, other, 3, padding=1), normalization(other), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Tagger(nn.Module):
    """A recurrent layer over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True), nn.Linear(D, 10)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = T - (ids[:, 0] % 8).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][0])


def _first_in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = h[:, 1:].mean(1)
    return h


def _part_in_place(h: Tensor) -> Tensor:
    h = h * 1
    h[..., : D // 2] += h[..., D // 2 : D]
    return h


def _masked_in_place(h: Tensor) -> Tensor:
    h = h * 1
    h[h.detach()[..., 0] > 0] *= 0.5
    return h


def _on_a_view(h: Tensor) -> Tensor:
    return F.relu(h.unflatten(-1, (2, -1)), inplace=True).flatten(-2)


def _by_index(h: Tensor) -> Tensor:
    return h[:, torch.arange(h.shape[1] - 1, -1, -1)]


def _best(h: Tensor) -> Tensor:
    return h + h.topk(4, 1).values.mean(1, keepdim=True)


def _one_of_each(h: Tensor) -> Tensor:
    best = h.detach()[..., 0].argmax(1)
    return h + h[torch.arange(len(h)), best][:, None]


def hand_written() -> dict[str, Callable[[], Case]]:
    """Builders of all cases, by title."""

    def sequence(within: Callable[[Tensor], Tensor]) -> Callable[[], Case]:
        return lambda: Case(Sequence(within, within), tokens, class_losses)

    def cnn(normalization: Callable[[int], nn.Module]) -> Callable[[], Case]:
        return lambda: Case(convolutional(normalization), images, class_losses)

    return {
        "group norm, in-place ReLU": cnn(lambda c: nn.GroupNorm(4, c)),
        "instance norm, in-place ReLU": cnn(lambda c: nn.InstanceNorm2d(c, affine=True)),
        "loss by log_softmax and gather": lambda: Case(Sequence(None, None, head=V), tokens, gathered_losses),
        "image features by masked_scatter": lambda: Case(Merged(), captioned, caption_losses),
        "experts, top-k, index, index_add_": lambda: Case(Mixture(), vectors, class_losses),
        "experts, top-k and masks": lambda: Case(Mixture(by_mask=True), vectors, class_losses),
        "h[:, 0] = ...": sequence(_first_in_place),
        "h[..., :k] += ...": sequence(_part_in_place),
        "h[mask] *= ...": sequence(_masked_in_place),
        "in-place ReLU on a view": sequence(_on_a_view),
        "h[:, index]": sequence(_by_index),
        "h[arange(B), index]": sequence(_one_of_each),
        "top-k over positions": sequence(_best),
        "sort over positions": sequence(lambda h: h.sort(1).values),
        "where": sequence(lambda h: torch.where(h > 0, h, 0.1 * h)),
        "roll": sequence(lambda h: h.roll(1, 1)),
        "flip": sequence(lambda h: h.flip(1)),
        "packed sequences": lambda: Case(Tagger(), tokens, class_losses),
    }
