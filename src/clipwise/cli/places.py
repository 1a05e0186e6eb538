"""Checks of the files and folders given as options, made before any other work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.report.plots import METADATA


def require_picture(file: Path | None) -> None:
    """Refuse a --plot file that cannot be written."""
    if file is None:
        return
    if file.suffix.lower() not in METADATA:
        raise ConfigurationError(f"--plot {file} is not possible: plot files end in {' or '.join(METADATA)}.")
    if not file.parent.is_dir():
        raise ConfigurationError(f"--plot {file} cannot be written: there is no folder {file.parent}. Create it first.")
    if file.is_dir():
        raise ConfigurationError(f"--plot {file} is a folder: name a file.")


def require_folder(folder: Path) -> None:
    """Refuse an --out that is not a folder, or that cannot be created or written."""
    whole = Path(os.path.abspath(folder))
    place = next(p for p in (whole, *whole.parents) if os.path.lexists(p))
    if not os.path.isdir(place):
        raise ConfigurationError(f"--out {folder} cannot be a folder: {place.name} is a file. Give another name.")
    try:
        # Testing the permission is not enough: /proc grants it and still refuses to write.
        with tempfile.TemporaryDirectory(dir=place) as trial:
            (Path(trial) / whole.relative_to(place)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out {folder} cannot be written: {place} does not allow it ({error.strerror}). Give another folder."
        ) from error
