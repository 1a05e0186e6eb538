"""The loss, the optimizer and the device of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices
from clipwise.recipes.kind import Encoder, Settings


def batch_loss(encoder: Encoder, model: nn.Module) -> Callable[..., Tensor]:
    """One loss per example, from the tensors of a batch."""
    own = getattr(encoder, "batch_loss", None)
    if own is not None:
        found: Callable[..., Tensor] = own(model)
        return found

    def loss(*batch: Tensor) -> Tensor:
        return encoder.loss(model(*batch[:-1]), batch[-1])

    return loss


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of the settings."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained, settings.learning_rate, settings.momentum, weight_decay=decay)
    if settings.optimizer == "adam":
        return torch.optim.Adam(trained, settings.learning_rate, weight_decay=decay)
    return torch.optim.AdamW(trained, settings.learning_rate, weight_decay=decay)


def device_of(choices: Choices) -> torch.device:
    """The device of the run."""
    if choices.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choices.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: this machine has no CUDA device that torch can use.")
    return torch.device(choices.device)
