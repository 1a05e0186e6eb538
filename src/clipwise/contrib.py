"""Extras of papers: clipping norms per layer, decaying norms, frozen entries, one random layer per example."""

from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.contrib.typical import ReleasedNorms
from clipwise.clipping.public import PublicData

__all__ = ["Adaptive", "ByNorm", "Multipliers", "NormDecay", "PublicData", "RandomLayer", "ReleasedNorms", "Sparse"]
