"""The networks that are measured, in plain torch and by name."""

from benchmarks.networks.partial import train_only
from benchmarks.networks.registry import build, names

__all__ = ["build", "names", "train_only"]
