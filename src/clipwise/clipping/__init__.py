"""Clipping strategies, which bound the sensitivity of a step."""

from torch import nn

from clipwise.clipping.backprop import Backprop
from clipwise.clipping.base import Bound, Clipper, Site, Strategy, noised_parts, recorded_strategy
from clipwise.clipping.batch import Batch, BatchClipper
from clipwise.clipping.lipschitz import Lipschitz
from clipwise.clipping.noise_shares import NoiseShares
from clipwise.clipping.noised_statistics import NoisedStatistics
from clipwise.clipping.per_example import PerExample
from clipwise.clipping.thresholds import Quantile
from clipwise.layers.clipped.layer import trainable_clips

__all__ = [
    "Backprop",
    "Batch",
    "BatchClipper",
    "Bound",
    "Clipper",
    "Lipschitz",
    "NoiseShares",
    "NoisedStatistics",
    "PerExample",
    "Quantile",
    "Site",
    "Strategy",
    "default_for",
    "noised_parts",
    "recorded_strategy",
]


def default_for(model: nn.Module) -> Strategy:
    """The default strategy: `Backprop` for a model from `layers.clip_inputs`, else `PerExample`."""
    return PerExample() if trainable_clips(model) is None else Backprop()
