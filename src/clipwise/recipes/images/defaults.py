"""Default settings for images. They are provisional; `python -m experiments recipes/images` searches for them."""

from __future__ import annotations

import torch

from clipwise.recipes.kind import Settings
from clipwise.validation.arguments import one_of

SCATTERING, TANH_CNN, WIDE_RESNET = "scattering", "tanh-cnn", "wrn-16-4"
_FEW = 20_000  # images
MODELS = (SCATTERING, TANH_CNN, WIDE_RESNET)


def image_settings(rows: int, epsilon: float, preset: str, channels: int, model: str | None = None) -> Settings:
    """Settings by the number of training images, the budget, the preset and the model.

    "best" trains longer. For colour images on a GPU it takes the wide residual network.
    """
    one_of("preset", preset, ("fast", "best"))
    if model is None and preset == "best" and channels == 3 and torch.cuda.is_available():
        model = WIDE_RESNET
    if model == TANH_CNN:
        return _tanh_cnn(rows, epsilon)
    if model == WIDE_RESNET:
        return _wide_resnet(rows, epsilon)
    return _scattering(rows, epsilon, preset)


def _scattering(rows: int, epsilon: float, preset: str) -> Settings:
    """The more images and budget, the larger the learning rate that the noise allows.

    Larger batches have less noise in relation to their sum, and take longer.
    """
    rate, steps = (1 / 8, 200) if rows <= _FEW and preset == "fast" else (1 / 16, 300)
    rate, steps = (1 / 4, 300) if preset == "best" else (rate, steps)
    learning_rate = min(4.0, max(0.01, 0.04 * (rows * epsilon / 1000) ** 0.8)) * 200 / steps
    return Settings(SCATTERING, max(1, round(rows * rate)), steps * rate, round(learning_rate, 4))


def _tanh_cnn(rows: int, epsilon: float) -> Settings:
    """From published results on MNIST, not from our search: batch size 1024, learning rate 2, clipping norm 0.1."""
    learning_rate = 2 * min(1.0, (rows * epsilon / 60_000) ** 0.8)
    return Settings(TANH_CNN, _batch_size(rows, 1 / 58, 1024), 15, max(0.05, round(learning_rate, 4)), max_norm=0.1)


def _wide_resnet(rows: int, epsilon: float) -> Settings:
    """Those of De et al. (2022) for CIFAR-10, not from our search."""
    epochs = 70 if epsilon < 4 else 200
    batch_size = _batch_size(rows, 1 / 12, 4096)
    return Settings(WIDE_RESNET, batch_size, epochs, 2.0, momentum=0.0, ema=0.999, views=16)


def _batch_size(rows: int, rate: float, most: int) -> int:
    """This share of the rows, at least 64 and at most `most` if there are so many."""
    return min(rows, most, max(64, round(rows * rate)))
