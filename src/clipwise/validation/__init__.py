"""Checks of arguments, models, losses and training loops. Internal."""
