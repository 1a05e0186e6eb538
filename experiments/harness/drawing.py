"""Deterministic plots, drawn by matplotlib if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.report.plots import METADATA, STYLE

LEFT_OUT = "plots are left out: install clipwise-dp[plots], then `python -m benchmarks --render` with this folder"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def drawing(file: Path, width: float, height: float) -> Iterator[Any]:
    """An empty figure (size in inches), written to the file at the end, without random ids and dates."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context({"svg.hashsalt": file.stem, "font.size": 8}):
        canvas = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield canvas
        canvas.savefig(file, metadata={"Date": None})


def picture(file: Path, draw: Callable[[Any], bool]) -> list[Path]:
    """Draw with a function in the style of `clipwise.report.plots`; writes no file if it draws nothing."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        canvas = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
        if not draw(canvas):
            return []
        canvas.savefig(file, format="svg", metadata=METADATA[".svg"])
    return [file]


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigurationError(
            "Plots need matplotlib, which is not installed: pip install 'clipwise-dp[plots]'. The tables are "
            "written without it."
        ) from error
