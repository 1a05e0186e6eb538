"""Clipping strategies, which bound the sensitivity of a step."""

from torch import nn

from clipwise.clipping.backprop import Backprop
from clipwise.clipping.base import Bound, Clipper, Site, Strategy, recorded_strategy
from clipwise.clipping.batch import Batch, BatchClipper
from clipwise.clipping.contrib.adaptive import Adaptive
from clipwise.clipping.contrib.by_norm import ByNorm
from clipwise.clipping.contrib.decay import Decay
from clipwise.clipping.contrib.multipliers import Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.released import Released
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.lipschitz import Lipschitz
from clipwise.clipping.noise_split import noised_parts
from clipwise.clipping.noised_statistics import NoisedStatistics
from clipwise.clipping.per_example import PerExample
from clipwise.clipping.public import Public
from clipwise.clipping.thresholds import Quantile
from clipwise.layers.clipped.layer import trainable_clips

__all__ = [
    "Adaptive",
    "Backprop",
    "Batch",
    "BatchClipper",
    "Bound",
    "ByNorm",
    "Clipper",
    "Decay",
    "Lipschitz",
    "Multipliers",
    "NoisedStatistics",
    "PerExample",
    "Public",
    "Quantile",
    "RandomLayer",
    "Released",
    "Site",
    "Sparse",
    "Strategy",
    "default_for",
    "noised_parts",
    "recorded_strategy",
]


def default_for(model: nn.Module) -> Strategy:
    """The default strategy: `Backprop` for a model from `layers.clip_inputs`, else `PerExample`."""
    return PerExample() if trainable_clips(model) is None else Backprop()
