"""The page of results of images."""

from __future__ import annotations


def write() -> None:
    """Write it from the results that are there."""
