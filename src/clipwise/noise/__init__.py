"""Gaussian noise, the key it is drawn from, and the release of noised sums."""
