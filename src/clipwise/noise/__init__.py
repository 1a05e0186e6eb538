"""Gaussian noise, its secret key, and the release of noised sums."""
