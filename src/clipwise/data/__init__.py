"""Real data sets by name."""

from clipwise.data.columns import columns
from clipwise.data.digits import digits
from clipwise.data.images import Look, images, look
from clipwise.data.split import Split, split

__all__ = ["Look", "Split", "columns", "digits", "images", "look", "split"]
