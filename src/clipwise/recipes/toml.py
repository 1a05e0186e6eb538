"""Reading and writing TOML, as far as the files of a run need it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return found
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also an encoding other than UTF-8
        raise ConfigurationError(f"{path} is not TOML: {error}.") from error


def text_of(content: Mapping[str, Any]) -> str:
    """Tables of values as TOML text. Values of None are left out, since TOML has none."""
    return "\n".join(_table((name,), table) for name, table in content.items() if table is not None)


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> str:
    lines = [f"[{'.'.join(map(_key, path))}]"]
    below = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            below.append(_table((*path, str(name)), value))
        elif value is not None:
            lines.append(f"{_key(str(name))} = {value_text(value)}")
    return "\n".join(["\n".join(lines) + "\n", *below])


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # The escapes of JSON are those of TOML, which also requires one for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_text(value: Any) -> str:
    """A value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        pairs = (f"{_key(str(name))} = {value_text(v)}" for name, v in value.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_text(v) for v in value) + "]"
    raise ConfigurationError(f"A {type(value).__name__} cannot be written to TOML.")
