"""Backpropagation clipping (Stevens et al. 2022), run again at its true epsilon."""
