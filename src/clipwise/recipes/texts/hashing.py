"""Hashed words: a text as a sparse vector of fixed length, by public functions alone. No vocabulary is learned.

Words and pairs of neighbouring words are hashed into D places with a public key, with a sign from the hash, so that two
words that share a place do not add up on average. A word that occurs n times counts sqrt(n). A short public list of
frequent English words is left out of the single words. The words and the pairs of a text have a fixed norm.

N: texts, T: entries of a text, D: places.
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

NORM = 10.0  # of a text's vector, up to words that share a place
TOKENS = 256  # words and pairs of a text
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


def hashed(texts: Iterable[str], places: int) -> tuple[Tensor, Tensor]:
    """The places of the words and pairs of each text, int32 [N, T], and their weights, float32 [N, T].

    T is `TOKENS` for all texts. Unused entries have the weight 0. The row of a text depends on it alone.
    """
    seen: dict[str, int] = {}
    rows = [_row(words(text), places, seen) for text in texts]
    ids_NT = np.stack([ids_T for ids_T, _ in rows]) if rows else np.zeros((0, TOKENS), np.int32)
    weights_NT = np.stack([weights_T for _, weights_T in rows]) if rows else np.zeros((0, TOKENS), np.float32)
    return torch.from_numpy(ids_NT), torch.from_numpy(weights_NT)


def _row(found: Sequence[str], places: int, seen: dict[str, int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Words first, then pairs, in the order of the text: what exceeds `TOKENS` is left out."""
    singles = Counter(word for word in found if word not in _FREQUENT)
    pairs = Counter(f"{first} {second}" for first, second in pairwise(found))
    ids_T, weights_T = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.float32)
    start = 0
    for counts, share in ((singles, _WORD_SHARE), (pairs, 1 - _WORD_SHARE)):
        tokens = list(counts)[: TOKENS - start]
        if tokens:
            hashes = np.array([_hash(token, seen) for token in tokens], np.uint64)
            sizes = np.sqrt(np.array([counts[token] for token in tokens], np.float64))
            part = slice(start, start + len(tokens))
            ids_T[part] = hashes % np.uint64(places)
            signs = 1.0 - 2.0 * (hashes >> np.uint64(63)).astype(np.float64)
            weights_T[part] = NORM * share**0.5 * signs * sizes / np.linalg.norm(sizes)
            start += len(tokens)
    return ids_T, weights_T


def _hash(token: str, seen: dict[str, int]) -> int:
    """64 bits, the same in every process and on every machine."""
    value = seen.get(token)
    if value is None:
        digest = hashlib.blake2b(token.encode("utf-8", "replace"), digest_size=8, key=_KEY).digest()
        value = int.from_bytes(digest, "big")
        if " " not in token:
            seen[token] = value
    return value
