"""Real data sets by name."""

from clipwise.data.digits import digits

__all__ = ["digits"]
