"""Loading and running a user's function that is named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from clipwise.errors import ClipwiseError, ConfigurationError


def load(target: str, argument: str = "TARGET") -> Callable[[], Any]:
    """Load the function named by `path/to/file.py:function` or `package.module:function`; errors name `argument`."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigurationError(
            f"{argument} is {target!r}: it must look like path/to/file.py:function or package.module:function."
        )
    with running(target):
        if place.endswith(".py"):
            module = _from_file(Path(place), argument)
        else:
            _look_in(Path.cwd())
            module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{place} has no function {name!r}: name one that it has.")
    made: Callable[[], Any] = function
    return made


def call(target: str, argument: str = "TARGET") -> Any:
    """What the named function returns."""
    function = load(target, argument)
    with running(target):
        return function()


@contextmanager
def running(target: str) -> Iterator[None]:
    """Report an error of the user's code in one line, with its file and line."""
    try:
        yield
    except ClipwiseError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not _is_foreign(f.filename)]
        place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
        raise ConfigurationError(f"{target} raised {type(error).__name__}{place}: {error}") from error


def _is_foreign(filename: str) -> bool:
    package, library = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)
    return filename.startswith((package, library, sys.prefix, "<frozen"))


def _from_file(path: Path, argument: str) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"{argument}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{argument}: {path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    _look_in(path.parent)  # as python does for a script, so that the file can import its neighbours
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _look_in(folder: Path) -> None:
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
