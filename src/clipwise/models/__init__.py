"""Models by name."""

from clipwise.models.small_cnn import small_cnn

__all__ = ["small_cnn"]
