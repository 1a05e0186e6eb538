"""Layers whose gradients are bounded by what goes into them and what comes back: backpropagation clipping."""

from clipwise.layers.clipped.from_public import norms_from_public
from clipwise.layers.clipped.layer import ClippedLayer
from clipwise.layers.clipped.put_in import clip_inputs
from clipwise.layers.clipped.set_clips import set_clips
from clipwise.layers.clipped.switch import unclipped

__all__ = ["ClippedLayer", "clip_inputs", "norms_from_public", "set_clips", "unclipped"]
