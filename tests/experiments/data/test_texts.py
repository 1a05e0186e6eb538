"""Texts as ids: the same everywhere, learned from nothing."""

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from experiments import data
from experiments.data.texts import encode


def write(file, head, *rows):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([head, *rows])
    file.write_bytes(gzip.compress(text.getvalue().encode()))


def test_title_and_description_make_one_text(tmp_path):
    head = ("label", "title", "description")
    write(tmp_path / "ag_news_train10k.csv.gz", head, (2, "One", "two three"), (0, "x", "y"))
    ids, labels = data.texts("ag_news", True, tmp_path, length=5).tensors
    assert labels.tolist() == [2, 0] and ids.shape == (2, 5)
    assert ids[0].tolist() == encode("one two three", length=5)


def test_the_same_word_has_the_same_id_everywhere():
    """A constant: another one would make other data sets of the same texts."""
    assert encode("News", length=2) == [4257, 0]


@given(st.text(), st.integers(1, 8), st.integers(2, 100))
def test_ids_are_in_range_and_no_word_looks_like_filling(text, length, buckets):
    ids = encode(text, length=length, buckets=buckets)
    assert len(ids) == length and all(0 <= i < buckets for i in ids)
    filled = ids.index(0) if 0 in ids else length
    assert all(i > 0 for i in ids[:filled]) and not any(ids[filled:])


def test_case_and_punctuation_do_not_matter():
    assert encode("Oil, prices!<br />Rise") == encode("oil prices rise") != encode("oil prices fall")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"data='wikipedia' is not known.*'ag_news'"):
        data.texts("wikipedia", True, tmp_path)
    with pytest.raises(ConfigurationError, match="holds no ag_news_test"):
        data.texts("ag_news", False, tmp_path)
