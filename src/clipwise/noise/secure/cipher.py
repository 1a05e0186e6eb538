"""Words of ChaCha20 from the package `cryptography` (OpenSSL): the key stream is the encryption of zeros.

A block is 64 bytes, a function of the key (32 bytes), a nonce (12 bytes) and a block counter (4 bytes, from 0).
The nonce is `use` (4 bytes) and `index` (8 bytes), so under one key no two pairs (use, index) share a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clipwise.errors import ConfigurationError

Words = npt.NDArray[np.uint64]

_LONGEST = 1 << 18  # bytes of one call: far below the 2^38 of one nonce


def require_cipher() -> None:
    """Raise if the package is missing."""
    _ciphers()


def words(key: bytes, use: int, index: int, count: int) -> Words:
    """The first `count` (at most 2^15) 64-bit words of stream `index` (below 2^64) for a `use` (below 2^32)."""
    assert 8 * count <= _LONGEST
    # OpenSSL takes the counter, then the nonce, both little-endian.
    place = bytes(4) + use.to_bytes(4, "little") + index.to_bytes(8, "little")
    package = _ciphers()
    stream = package.Cipher(package.algorithms.ChaCha20(key, place), mode=None).encryptor()
    return np.frombuffer(stream.update(_ZEROS[: 8 * count]), dtype="<u8").astype(np.uint64, copy=False)


_ZEROS = memoryview(bytes(_LONGEST))


def _ciphers() -> Any:
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError as error:
        raise ConfigurationError(
            "noise='secure' needs the package 'cryptography', for ChaCha20: install clipwise-dp[secure], or use "
            "noise='standard'."
        ) from error
    return ciphers
