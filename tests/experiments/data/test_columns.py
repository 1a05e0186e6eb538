import gzip
import lzma

import pytest

from clipwise.errors import ConfigurationError
from experiments import data

TEXT = 'age,job,note\n31,clerk,"a, b\nc"\n2.5,none,\n'


@pytest.mark.parametrize(("end", "compress"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_numbers_are_numbers_and_text_is_text(tmp_path, end, compress):
    (tmp_path / f"people.csv.{end}").write_bytes(compress(TEXT.encode()))
    found = data.columns("people", tmp_path)
    assert list(found) == ["age", "job", "note"]
    assert found["age"].dtype == float and found["age"].tolist() == [31, 2.5]
    assert found["job"].tolist() == ["clerk", "none"] and found["note"].tolist() == ["a, b\nc", ""]


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no people"):
        data.columns("people", tmp_path)
