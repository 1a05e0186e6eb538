"""Synthetic data of the right shapes. How long a step takes does not depend on the values in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError


@dataclass(frozen=True)
class Images:
    """Square images with a class each."""

    channels: int
    size: int
    classes: int = 10

    @property
    def pixels(self) -> int:
        """The number of values in an image."""
        return self.channels * self.size**2

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` random images and labels."""
        images = torch.rand(count, self.channels, self.size, self.size)
        return images, torch.randint(self.classes, (count,))


@dataclass(frozen=True)
class Tokens:
    """Texts as ids. The target is a class, or the next id at each position."""

    length: int
    vocabulary: int
    classes: int = 2
    continued: bool = False

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` random texts and targets."""
        ids = torch.randint(self.vocabulary, (count, self.length + 1))
        labels = torch.randint(self.classes, (count,))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous() if self.continued else labels


Shape = Images | Tokens

# Names may also end with a length: `text-1024`, `imdb-64`.
_TEXTS = {"text": Tokens(length=256, vocabulary=50_257, continued=True), "imdb": Tokens(length=256, vocabulary=20_000)}
_NAMED: dict[str, Shape] = {
    "mnist": Images(1, 28),  # Fashion-MNIST has the same shape, and so the same times
    "cifar10": Images(3, 32),
    **_TEXTS,
}


def shape_of(data: str) -> Shape:
    """The shape behind a name.

    `images-64` are colour images of 64 x 64, as in scaled LSUN. `text-1024` are texts of 1024 ids with the next id
    as the target; `imdb-64` are texts of 64 ids with a class each.
    """
    kind, _, size = data.partition("-")
    if kind == "images" and size.isdigit():
        return Images(3, int(size))
    if kind in _TEXTS and size.isdigit():
        return replace(_TEXTS[kind], length=int(size))
    if data not in _NAMED:
        known = ", ".join(_NAMED)
        raise ConfigurationError(
            f"data={data!r} is not known: use one of {known}, or images-64, text-128 and the like."
        )
    return _NAMED[data]
