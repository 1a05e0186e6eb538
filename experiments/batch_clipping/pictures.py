"""Images in the form of the paper's networks: 32 x 32, cropped and flipped for training, standardised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.sampling.augmentation import Crop, Flip, Views
from experiments import data

SIDE, PADDING = 32, 4


@dataclass(frozen=True)
class Pictures:
    """The parts of one data set, on a device.

    Attributes:
        private: the training part.
        public: the tenth that counts as public.
        held_out: the evaluation part: the test part or, while settings are chosen, the validation tenth.
        look: the public constants of the images.
    """

    private: TensorDataset
    public: TensorDataset
    held_out: TensorDataset
    look: data.Look

    def centred(self, x_BCHW: Tensor) -> Tensor:
        """For evaluation: the centred image, standardised."""
        return self.look.standardised(F.pad(x_BCHW, [(SIDE - self.look.side) // 2] * 4))

    def views(self, count: int, augmented: bool, flipped: bool = True) -> Views:
        """For training: random views of 32 x 32; without augmentation, the centred image."""
        if augmented:
            return Views(count, Crop(SIDE, PADDING), *([Flip()] if flipped else []))
        return Views(count, lambda x, random: F.pad(x, [(SIDE - self.look.side) // 2] * 4))


def pictures(name: str, folder: Path | None, device: torch.device, *, judged_by: str) -> Pictures:
    """A data set split into parts. `judged_by` is "test", or "validation" while the test part must not be read."""
    is_validation = judged_by == "validation"
    parts = data.split(_at_hand(name, True, folder), validation=is_validation)
    held_out = parts.validation if is_validation else _at_hand(name, False, folder)
    look = data.look(name)
    if name == "digits":
        look = data.Look(look.channels, SIDE, look.mean, look.deviation)
    private, public, held_out = (data.placed(part, device) for part in (parts.private, parts.public, held_out))
    return Pictures(private, public, held_out, look)


def _at_hand(name: str, train: bool, folder: Path | None) -> TensorDataset:
    dataset = data.images(name, train, folder)
    if name != "digits":
        return dataset
    images, labels = dataset.tensors
    return TensorDataset(F.interpolate(images, scale_factor=SIDE // images.shape[-1]), labels)
