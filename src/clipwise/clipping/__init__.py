"""How sensitivity is bounded: one file a strategy."""

from clipwise.clipping.backprop import Backprop
from clipwise.clipping.base import Bound, Clipper, Site, Strategy, noised_parts
from clipwise.clipping.batch import Batch, BatchClipper
from clipwise.clipping.contrib.adaptive import Adaptive
from clipwise.clipping.contrib.by_norm import ByNorm
from clipwise.clipping.contrib.decay import Decay
from clipwise.clipping.contrib.multipliers import Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.released import Released
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.lipschitz import Lipschitz
from clipwise.clipping.per_example import PerExample
from clipwise.clipping.public import Public
from clipwise.clipping.quantile import Quantile
from clipwise.clipping.statistics import NoisedStatistics

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
    "noised_parts",
]
