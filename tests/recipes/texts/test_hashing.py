from __future__ import annotations

import pytest
import torch

from clipwise.recipes.texts.hashing import NORM, TOKENS, hashed, words

TEXTS = [
    "A good film, a GOOD film.",
    "",
    "Ein schöner Film\n",
    "日本語のテキスト",
    "the and of",
    "\ud800 surrogate",
    "x " * 500,
]


def test_words():
    assert words("It's naïve — <br />don't! text's 3.5 _x_") == ["it's", "naïve", "don't", "text's", "3", "5", "x"]
    assert words("日本") == ["日", "本"]
    assert words("ﬁne ＡＢＣ") == ["fine", "abc"]


def test_rows_have_a_fixed_length_and_norm():
    ids, weights = hashed(TEXTS, 2**14)
    assert ids.shape == weights.shape == (len(TEXTS), TOKENS)
    assert ids.min() >= 0 and ids.max() < 2**14
    norms = weights.norm(dim=1).tolist()
    assert norms[0] == norms[2] == pytest.approx(NORM)
    assert norms[1] == 0


def test_long_texts_are_cut():
    ids, weights = hashed([" ".join(f"word{i}" for i in range(10 * TOKENS))], 2**14)
    assert (weights != 0).all() and ids.shape == (1, TOKENS)


def test_a_text_does_not_depend_on_the_others():
    for row, text in enumerate(TEXTS):
        for whole, alone in zip(hashed(TEXTS, 1024), hashed([text], 1024), strict=True):
            assert torch.equal(whole[row], alone[0])


def test_no_texts():
    assert [part.shape for part in hashed([], 8)] == [(0, TOKENS), (0, TOKENS)]


def test_hashes_are_the_same_in_all_processes():
    ids, weights = hashed(["good film"], 2**14)
    assert ids[0, :3].tolist() == [6191, 795, 7563]  # found in another process
    assert weights[0, :3].sign().tolist() == [1, -1, -1]


def test_frequent_words_count_in_pairs_only():
    _, weights = hashed(["the of"], 2**14)
    assert int((weights != 0).sum()) == 1
