"""The table of bars: what a private step costs next to plain training, and what it may cost at most."""
