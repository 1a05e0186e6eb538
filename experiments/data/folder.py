"""The folder of data sets that do not ship with clipwise."""

from __future__ import annotations

import os
from pathlib import Path

from clipwise.errors import ConfigurationError

VARIABLE = "CLIPWISE_DATA"


def folder_of(given: str | os.PathLike[str] | None = None) -> Path:
    """The given folder, or that of the environment variable CLIPWISE_DATA."""
    named = given or os.environ.get(VARIABLE)
    if not named:
        raise ConfigurationError(
            f"There is no folder of data sets: give one (--data DIR), or set the environment variable {VARIABLE}. "
            "The data set 'digits' needs none."
        )
    folder = Path(named)
    if not folder.is_dir():
        raise ConfigurationError(f"The folder of data sets {str(folder)!r} does not exist.")
    return folder


def require_file(file: Path, dataset: str) -> Path:
    """The file; raises with the names of the file and data set if it is missing."""
    if not file.is_file():
        raise ConfigurationError(
            f"Data set {dataset!r} is not complete: the folder of data sets holds no {file.parent.name}/{file.name}."
        )
    return file
