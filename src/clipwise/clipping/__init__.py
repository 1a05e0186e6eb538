"""How sensitivity is bounded: one file a strategy."""

from clipwise.clipping.adaptive import Adaptive
from clipwise.clipping.backprop import Backprop
from clipwise.clipping.batch import Batch, BatchClipper
from clipwise.clipping.by_norm import ByNorm
from clipwise.clipping.decay import Decay
from clipwise.clipping.lipschitz import Lipschitz
from clipwise.clipping.multipliers import Multipliers
from clipwise.clipping.per_example import PerExample
from clipwise.clipping.public import Public
from clipwise.clipping.quantile import Quantile
from clipwise.clipping.random_layer import RandomLayer
from clipwise.clipping.released import Released
from clipwise.clipping.sparse import Sparse
from clipwise.clipping.statistics import NoisedStatistics
from clipwise.clipping.strategy import Bound, Clipper, Site, Strategy, noised_parts

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
