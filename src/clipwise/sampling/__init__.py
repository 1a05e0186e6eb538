"""Sampling: schemes draw batches and make their accounting events; a loader yields the batches."""
