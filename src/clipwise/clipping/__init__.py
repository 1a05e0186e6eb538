"""How sensitivity is bounded: one file a strategy."""

from clipwise.clipping.per_example import PerExample
from clipwise.clipping.quantile import Quantile
from clipwise.clipping.strategy import Bound, Clipper, Site, Strategy, noised_parts

__all__ = ["Bound", "Clipper", "PerExample", "Quantile", "Site", "Strategy", "noised_parts"]
