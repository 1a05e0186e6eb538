"""Texts as data of `clipwise train`."""

from clipwise.recipes.texts.encoder import TextEncoder
from clipwise.recipes.texts.source import TextSource

__all__ = ["TextEncoder", "TextSource"]
