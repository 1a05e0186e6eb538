"""Hashed words: a text as a vector of fixed length, by public functions alone. No vocabulary is learned.

Words and pairs of neighbouring words are hashed into D places with a public key, with a sign from the hash, so that two
words that share a place do not add up on average. A word that occurs n times counts sqrt(n). A short public list of
frequent English words is left out of the single words. The words and the pairs of a text have a fixed norm.

N: texts, D: places.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NORM = 10.0  # of a text's vector
_KEY = b"clipwise hashed words 1"
_WORD_SHARE = 0.5  # of the squared norm; the rest is for pairs
_HTML = re.compile(r"<[^<>]{1,40}>")
# Chinese, Japanese and Korean characters are words of their own: spaces do not separate the words of these scripts, or
# separate long ones.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[^\W_])+(?:['’](?:(?![{_CJK}])[^\W_])+)*")
_FREQUENT = frozenset(
    """
    a about after all also am an and any are as at be because been before being both but by can could did do does for
    from had has have he her here him his how i if in into is it its it's just me more my of on one or other our out
    over said she so some such than that the their them then there these they this those through to under up us was
    we were what when where which while who will with would you your
    """.split()  # noqa: SIM905 (a list of quoted words is harder to read)
)


def words(text: str) -> list[str]:
    """Lower-case words in order, without HTML tags."""
    return _WORD.findall(unicodedata.normalize("NFKC", _HTML.sub(" ", text)).lower())


def hashed(texts: Iterable[str], places: int) -> Tensor:
    """Vectors of the texts, [N, D] in bfloat16. The vector of a text depends on it alone."""
    seen: dict[str, int] = {}
    rows = [torch.from_numpy(_vector(words(text), places, seen)).bfloat16() for text in texts]
    return torch.stack(rows) if rows else torch.zeros(0, places, dtype=torch.bfloat16)


def _vector(found: Sequence[str], places: int, seen: dict[str, int]) -> NDArray[np.float32]:
    singles = Counter(word for word in found if word not in _FREQUENT)
    pairs = Counter(f"{first} {second}" for first, second in pairwise(found))
    parts = ((singles, _WORD_SHARE), (pairs, 1 - _WORD_SHARE))
    v_D = sum((share**0.5 * _unit(_sum(counts, places, seen)) for counts, share in parts), np.zeros(places))
    return (NORM * v_D).astype(np.float32)


def _sum(counts: Counter[str], places: int, seen: dict[str, int]) -> NDArray[np.float64]:
    if not counts:
        return np.zeros(places)
    hashes = np.array([_hash(token, seen) for token in counts], np.uint64)
    signs = 1.0 - 2.0 * (hashes >> np.uint64(63))
    weights = signs * np.sqrt(np.fromiter(counts.values(), np.float64, len(counts)))
    return np.bincount((hashes % np.uint64(places)).astype(np.int64), weights, places).astype(np.float64)


def _hash(token: str, seen: dict[str, int]) -> int:
    """64 bits, the same in every process and on every machine."""
    value = seen.get(token)
    if value is None:
        digest = hashlib.blake2b(token.encode("utf-8", "replace"), digest_size=8, key=_KEY).digest()
        value = int.from_bytes(digest, "big")
        if " " not in token:
            seen[token] = value
    return value


def _unit(v_D: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = np.linalg.norm(v_D)
    return v_D / norm if norm > 0 else v_D
