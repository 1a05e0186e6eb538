"""Backpropagation clipping (Stevens et al. 2022), run again at the epsilon that its noise buys."""
