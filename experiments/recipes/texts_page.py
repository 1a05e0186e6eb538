"""The page of results of texts."""

from __future__ import annotations


def write() -> None:
    """Write it from the results that are there."""
