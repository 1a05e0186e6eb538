"""Words are those of ChaCha20 as published, and no two streams share a word."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import make_private
from clipwise.errors import ConfigurationError
from clipwise.noise.secure.cipher import words
from tests.runs import data, network, sgd

needs_cipher = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)
KEY = bytes(range(32))


@needs_cipher
@pytest.mark.parametrize(
    ("key", "use", "index", "block", "stream"),
    [
        # RFC 8439, appendix A.1, vectors 1, 2 and 5
        (bytes(32), 0, 0, 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
        (bytes(32), 0, 0, 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
        (bytes(32), 0, 2 << 56, 0, "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"),
        # section 2.3.2
        (KEY, 0x09000000, 0x4A000000, 1, "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"),
    ],
)
def test_the_words_are_those_of_the_standard(key: bytes, use: int, index: int, block: int, stream: str) -> None:
    found = words(key, use, index, 8 * block + 4)[8 * block :]
    assert found.astype("<u8").tobytes().hex() == stream


def chacha20(key: bytes, nonce: bytes, block: int) -> bytes:
    """A block of the cipher, written down a second time."""

    def rotated(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & 0xFFFFFFFF

    def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for p, q, r, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[p] = (s[p] + s[q]) & 0xFFFFFFFF
            s[r] = rotated(s[r] ^ s[p], by)

    text = b"expand 32-byte k" + key + block.to_bytes(4, "little") + nonce
    start = np.frombuffer(text, "<u4").tolist()
    state = list(start)
    for _ in range(10):
        for place in range(4):
            quarter(state, *(4 * row + place for row in range(4)))
        for place in range(4):
            quarter(state, *(4 * row + (place + row) % 4 for row in range(4)))
    return b"".join(((a + b) & 0xFFFFFFFF).to_bytes(4, "little") for a, b in zip(state, start, strict=True))


@needs_cipher
@settings(max_examples=50, deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    use=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**64 - 1),
    count=st.integers(0, 60),
)
def test_use_and_index_are_the_nonce(key: bytes, use: int, index: int, count: int) -> None:
    nonce = use.to_bytes(4, "little") + index.to_bytes(8, "little")
    expected = b"".join(chacha20(key, nonce, block) for block in range(8))[: 8 * count]
    assert words(key, use, index, count).astype("<u8").tobytes() == expected


@needs_cipher
def test_no_two_streams_share_a_word() -> None:
    places = [(use, index) for use in (0, 1, 2, 3) for index in (0, 1, 2, 255, 256, 2**32, 2**63)]
    found = np.concatenate([words(KEY, use, index, 500) for use, index in places])
    for position in range(32):
        other = bytearray(KEY)
        other[position] ^= 1
        found = np.concatenate([found, words(bytes(other), 0, 0, 500)])
    assert len(np.unique(found)) == len(found)


def test_without_the_package_a_run_is_refused_and_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    model = network()
    with pytest.raises(ConfigurationError, match=r"clipwise-dp\[secure\]"):
        make_private(model, sgd(model), data(), batch_size=8, noise_multiplier=1.0, noise="secure")
    make_private(model, sgd(model), data(), batch_size=8, noise_multiplier=1.0)
