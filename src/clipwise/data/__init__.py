"""Real data sets by name."""
