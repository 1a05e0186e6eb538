"""The networks that are measured, in plain torch and by name."""

from clipwise.bench.networks.partial import train_only
from clipwise.bench.networks.registry import build, names

__all__ = ["build", "names", "train_only"]
