"""Layers for private models, and functions that replace or wrap layers of an existing model."""

from clipwise.layers.batch_statistics import (
    BatchStatisticsNorm,
    ReleasedStatisticsNorm,
    recompute_statistics,
    with_released_statistics,
    without_running_statistics,
)
from clipwise.layers.bounded import BoundedGroupNorm, BoundedLayerNorm, ClipInput
from clipwise.layers.clipped import ClippedLayer, clip_inputs, set_clips
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.layers.public_statistics import PublicStatistics
from clipwise.layers.replace_batchnorm import replace_batchnorm
from clipwise.layers.standardized_weights import StandardizedWeight, standardize_weights
from clipwise.layers.tiled_cross_entropy import linear_cross_entropy

__all__ = [
    "BatchStatisticsNorm",
    "BoundedGroupNorm",
    "BoundedLayerNorm",
    "ClipInput",
    "ClippedLayer",
    "PublicBatchNorm",
    "PublicStatistics",
    "ReleasedStatisticsNorm",
    "StandardizedWeight",
    "clip_inputs",
    "linear_cross_entropy",
    "recompute_statistics",
    "replace_batchnorm",
    "set_clips",
    "standardize_weights",
    "with_released_statistics",
    "without_running_statistics",
]
