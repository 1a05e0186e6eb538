"""Nguyen et al.: batch clipping and adaptive layerwise clipping."""
