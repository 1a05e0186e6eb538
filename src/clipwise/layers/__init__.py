"""Modules that a private model may use, and functions that put them in."""

from clipwise.layers.batch_statistics import (
    BatchStatisticsNorm,
    ReleasedStatisticsNorm,
    recompute_statistics,
    with_released_statistics,
    without_running_statistics,
)
from clipwise.layers.bounded_norm import BoundedGroupNorm, BoundedLayerNorm
from clipwise.layers.clip_input import ClipInput
from clipwise.layers.clipped import ClippedLayer, clip_inputs, norms_from_public, set_clips
from clipwise.layers.l2_attention import L2Attention, L2Mixture
from clipwise.layers.noisy_weights import NoisyWeights, with_noisy_weights
from clipwise.layers.public_batchnorm import (
    PublicBatchNorm,
    PublicBatchNorm1d,
    PublicBatchNorm2d,
    PublicBatchNorm3d,
)
from clipwise.layers.public_statistics import PublicStatistics
from clipwise.layers.replace import replace_batchnorm
from clipwise.layers.standardize import StandardizedWeight, standardize_weights
from clipwise.layers.tempered import TemperedSigmoid

__all__ = [
    "BatchStatisticsNorm",
    "BoundedGroupNorm",
    "BoundedLayerNorm",
    "ClipInput",
    "ClippedLayer",
    "L2Attention",
    "L2Mixture",
    "NoisyWeights",
    "PublicBatchNorm",
    "PublicBatchNorm1d",
    "PublicBatchNorm2d",
    "PublicBatchNorm3d",
    "PublicStatistics",
    "ReleasedStatisticsNorm",
    "StandardizedWeight",
    "TemperedSigmoid",
    "clip_inputs",
    "norms_from_public",
    "recompute_statistics",
    "replace_batchnorm",
    "set_clips",
    "standardize_weights",
    "with_noisy_weights",
    "with_released_statistics",
    "without_running_statistics",
]
