"""Files and folders that options name, looked at before anything else is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.report.plots import METADATA


def require_picture(file: Path | None) -> None:
    """Refuse a file for --plot that could not be written in the end."""
    if file is None:
        return
    if file.suffix.lower() not in METADATA:
        raise ConfigurationError(f"--plot {file} is not possible: pictures end in {' or '.join(METADATA)}.")
    if not file.parent.is_dir():
        raise ConfigurationError(
            f"--plot {file} cannot be written: there is no folder {file.parent}. Make it first."
        )
    if file.is_dir():
        raise ConfigurationError(f"--plot {file} is a folder: name a file.")


def require_folder(folder: Path) -> None:
    """Refuse a folder for --out that is none, or that cannot be made or written."""
    whole = Path(os.path.abspath(folder))
    place = next(p for p in (whole, *whole.parents) if os.path.lexists(p))
    if not os.path.isdir(place):
        raise ConfigurationError(
            f"--out {folder} cannot be a folder: {place.name} is a file. Give another name."
        )
    try:
        # To ask for the permission is not enough: a system may grant it and still refuse, as /proc does.
        with tempfile.TemporaryDirectory(dir=place) as trial:
            (Path(trial) / whole.relative_to(place)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out {folder} cannot be written: {place} does not allow it ({error.strerror}). "
            "Give another folder."
        ) from error
