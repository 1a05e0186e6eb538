"""The experiments of Davody et al. on normalization layers, in sound forms."""
