"""Certified bounds on per-example gradients from the norms of the weights. No per-example gradient is formed."""

from clipwise.lipschitz.bounds import Bounds, bounds_of
from clipwise.lipschitz.losses import (
    BoundedLoss,
    CosineSimilarity,
    Huber,
    Logistic,
    MulticlassHinge,
    SoftmaxCrossEntropy,
    clip_output_gradients,
)
from clipwise.lipschitz.trace import Network, trace
from clipwise.lipschitz.traced_model_check import GraphMatch
from clipwise.lipschitz.weights import clip_weights_, limits_of, on_limit

__all__ = [
    "BoundedLoss",
    "Bounds",
    "CosineSimilarity",
    "GraphMatch",
    "Huber",
    "Logistic",
    "MulticlassHinge",
    "Network",
    "SoftmaxCrossEntropy",
    "bounds_of",
    "clip_output_gradients",
    "clip_weights_",
    "limits_of",
    "on_limit",
    "trace",
]
