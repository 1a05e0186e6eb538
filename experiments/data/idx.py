"""Files of the idx format, in which MNIST and its relatives are shipped."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import ConfigurationError

_UNSIGNED_BYTES = 8


def read_idx(file: Path) -> NDArray[np.uint8]:
    """The array in a gzipped idx file of unsigned bytes.

    Its head is two zero bytes, the type, the number of axes, and each axis' length as a big-endian word.
    """
    try:
        raw = gzip.decompress(file.read_bytes())
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        if zeros == 0 and kind == _UNSIGNED_BYTES:
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, struct.error, ValueError):
        pass
    raise ConfigurationError(f"{file.name} is not a gzipped idx file of unsigned bytes: get it again.")
