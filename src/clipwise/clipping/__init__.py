"""How sensitivity is bounded: one file a strategy."""

from clipwise.clipping.per_example import PerExample
from clipwise.clipping.strategy import Bound, Clipper, Strategy

__all__ = ["Bound", "Clipper", "PerExample", "Strategy"]
