"""Images as data of `clipwise train`."""

from clipwise.recipes.images.encoder import ImageEncoder
from clipwise.recipes.images.source import ImageSource

__all__ = ["ImageEncoder", "ImageSource"]
