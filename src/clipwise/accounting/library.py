"""dp-accounting, loaded when a figure needs it: training and the PLD accountant work without it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load(module: str) -> Any:
    """A module of dp-accounting by its dotted name, or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "This accountant needs the package dp-accounting, which is not installed: run "
            "`pip install dp-accounting`."
        ) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep the library's own log messages away while it runs, for those that a caller knows to be harmless."""
    logger = logging.getLogger("absl")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
