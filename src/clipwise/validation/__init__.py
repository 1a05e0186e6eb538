"""Checks of what a user gives: models, losses, batches."""
