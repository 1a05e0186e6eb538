"""Random augmentations of images, drawn per example, and averages over several views of an example.

    views = augment.Views(8, augment.Crop(32, padding=4), augment.Flip())
    private = make_private(..., augmentation=views)
    for x, y in private.loader:  # eight rows per example
        private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)

Guarantee:
    - The loss of an example is the mean over K views of that example alone. The gradient of the mean is clipped, so the
      sensitivity is the same as without views, for any K.
    - The draws must be as secret as the noise: removing a record from a batch shifts the draws of the records after it,
      and no clip bounds that. So they come from the key of the run: one generator per piece of a batch, with its whole
      state from the key. A batch that is drawn again before its release has the same views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.sampling.batch_structure import map_tensors, mapping_like, sequence_like
from clipwise.sampling.generators import generator_from, private_generator
from clipwise.validation.arguments import whole

Draw = Callable[[Tensor, torch.Generator], Tensor]  # (rows, generator) -> changed rows


class Crop:
    """A random square crop of `size`, after zero padding by `padding`. Drawn uniformly for each row."""

    def __init__(self, size: int, padding: int = 4) -> None:
        self.size, self.padding = whole("Crop: size", size, least=1), whole("Crop: padding", padding, least=0)

    def __call__(self, x_BCHW: Tensor, random: torch.Generator) -> Tensor:
        _require_images(self, x_BCHW)
        padded = torch.nn.functional.pad(x_BCHW, [self.padding] * 4)
        B, C, H, W = padded.shape
        if min(H, W) < self.size:
            raise ConfigurationError(
                f"Crop(size={self.size}, padding={self.padding}) is larger than the padded image: take a smaller size "
                "or more padding."
            )
        top_B, left_B = (
            torch.randint(0, most - self.size + 1, (B,), generator=random).to(padded.device) for most in (H, W)
        )
        along = torch.arange(self.size, device=padded.device)
        row_BHW = (top_B[:, None] + along)[:, :, None]
        column_BHW = (left_B[:, None] + along)[:, None, :]
        at_B1HW = (row_BHW * W + column_BHW)[:, None]
        taken = padded.flatten(2).gather(2, at_B1HW.flatten(2).expand(-1, C, -1))
        return taken.view(B, C, self.size, self.size)


class Flip:
    """A horizontal flip with probability 1/2, drawn for each row."""

    def __call__(self, x_BCHW: Tensor, random: torch.Generator) -> Tensor:
        _require_images(self, x_BCHW)
        flips_B = torch.rand(len(x_BCHW), generator=random).to(x_BCHW.device) < 0.5
        return torch.where(flips_B.view(-1, 1, 1, 1), x_BCHW.flip(3), x_BCHW)


MOST_VIEWS = 10_000


class Views:
    """K random views of each example, as consecutive rows, and the mean of their losses.

    Args:
        count: K.
        draws: augmentations, applied in order: `Crop`, `Flip`, or any function of rows and a generator that treats
            each row independently.
    """

    def __init__(self, count: int, *draws: Draw) -> None:
        self.count = whole("augmentation, Views: the number of views", count, least=1, most=MOST_VIEWS)
        for draw in draws:
            if isinstance(draw, type) or not callable(draw):
                raise ConfigurationError(
                    f"Views: {draw!r} is no function of rows and a generator: give Crop(32) or Flip(), an object and "
                    "not its class, or a function of your own."
                )
        self._draws = draws

    def of(self, x_BCHW: Tensor, random: torch.Generator | None = None) -> Tensor:
        """[B, C, H, W] to [B K, C, H', W']: the views of an example are K consecutive rows.

        `random` is a CPU generator. By default it is a new one, from the operating system's randomness.
        """
        random = private_generator() if random is None else random
        rows = x_BCHW.repeat_interleave(self.count, 0)
        for draw in self._draws:
            rows = draw(rows, random)
        return rows

    def labels(self, y_B: Tensor) -> Tensor:
        """[B, ...] to [B K, ...]: the label of the example for each view. A scalar does not change."""
        return y_B.repeat_interleave(self.count, 0) if y_B.dim() else y_B

    def of_batch(self, batch: Any, random: torch.Generator | None = None) -> Any:
        """The views of a batch: its inputs are augmented, everything else is repeated for each view.

        The inputs are the first entry of a tuple or list. In a mapping they are the only tensor of three or more
        dimensions, or, if there is none, the only floating-point tensor of two.
        """
        if isinstance(batch, Tensor):
            return self.of(batch, random)
        if not self._draws:
            return map_tensors(self.labels, batch)
        if isinstance(batch, Mapping):
            inputs = _inputs_of(batch)
            return mapping_like(
                batch,
                {
                    key: self.of(value, random) if key == inputs else map_tensors(self.labels, value)
                    for key, value in batch.items()
                },
            )
        if not isinstance(batch, (tuple, list)) or not batch or not isinstance(batch[0], Tensor):
            raise ConfigurationError(
                "Views with random changes needs batches whose first entry is a tensor of inputs, as in (inputs, "
                "labels), or a mapping: return such batches from collate_fn, or give augmentation_multiplicity=K and "
                "change the rows in your loop."
            )
        first, *others = batch
        return sequence_like(batch, [self.of(first, random), *(map_tensors(self.labels, other) for other in others)])

    def alike(self) -> Views:
        """The same views with the same draws for every example, so that examples can be compared across batches."""
        return _Alike(self.count, *self._draws)

    def mean(self, losses: Tensor) -> Tensor:
        """[B K] losses of views to [B] losses of examples."""
        if losses.dim() != 1 or len(losses) % self.count:
            raise ConfigurationError(
                f"Views.mean needs a vector with {self.count} losses for each example: compute them on Views.of(x), "
                "with reduction='none'."
            )
        return losses.view(len(losses) // self.count, self.count).mean(1)


class _Alike(Views):
    def of(self, x_BCHW: Tensor, random: torch.Generator | None = None) -> Tensor:
        if len(x_BCHW) == 0:
            return super().of(x_BCHW)
        rows = (x_BCHW[row : row + 1] for row in range(len(x_BCHW)))
        return torch.cat([super(_Alike, self).of(x_1CHW, generator_from(bytes(32))) for x_1CHW in rows])


def _inputs_of(batch: Mapping[Any, Any]) -> Any:
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    found = [key for key, t in tensors.items() if t.dim() >= 3]
    found = found or [key for key, t in tensors.items() if t.dim() == 2 and t.is_floating_point()]
    if len(found) != 1:
        raise ConfigurationError(
            "Views with random changes needs one entry of the batch to be the inputs, and in this mapping "
            + ("no tensor" if not found else f"each of {', '.join(map(repr, found))}")
            + " could be: return a tuple with the inputs first from collate_fn, or give augmentation_multiplicity=K "
            "and change the rows in your loop."
        )
    return found[0]


def _require_images(draw: Draw, x: Tensor) -> None:
    if x.dim() != 4:
        raise ConfigurationError(
            f"augment.{type(draw).__name__} takes images of shape [B, C, H, W], and these rows have {x.dim()} "
            "dimensions: give images, or another function of rows and a generator."
        )
