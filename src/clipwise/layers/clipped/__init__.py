"""Layers with clipped inputs and upstream gradients, for backpropagation clipping."""

from clipwise.layers.clipped.clip_inputs import clip_inputs, set_clips
from clipwise.layers.clipped.layer import ClippedLayer
from clipwise.layers.clipped.switch import unclipped

__all__ = ["ClippedLayer", "clip_inputs", "set_clips", "unclipped"]
