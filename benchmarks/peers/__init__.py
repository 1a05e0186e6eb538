"""The table of targets: the cost of a private step relative to plain training, and its upper limits."""
