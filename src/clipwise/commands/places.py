"""Files and folders that options name, looked at before anything else is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clipwise.errors import ConfigurationError
from clipwise.figures import METADATA


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
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not place.is_dir():
        raise ConfigurationError(
            f"--out {folder} cannot be a folder: {place.name} is a file. Give another name."
        )
    if not os.access(place, os.W_OK):
        raise ConfigurationError(
            f"--out {folder} cannot be written: {place} does not allow it. Give another folder."
        )


def require_results(folders: Sequence[Path], name: str) -> None:
    """Refuse a folder for --take without results in it."""
    for folder in folders:
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"--take {folder}: there is no {name} in it. Give a folder of earlier results."
            )
