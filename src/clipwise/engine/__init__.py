"""The private run: `make_private`, the step, the compiled step, and resuming from a checkpoint."""
