from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from clipwise.recipes.tables.read import Table, read_names, read_table

CITIES = "name,city\nÅsa,Zürich\n李,大阪\n"


def written(folder: Path, content: str | bytes, name: str = "data.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return path


def cells(table: Table) -> dict[str, list[str]]:
    return {name: [c.cells[code] for code in c.codes_N] for name, c in table.columns.items()}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_the_byte_order_mark_decides_the_encoding(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, CITIES, encoding=encoding)
    assert cells(read_table(path)) == {"name": ["Åsa", "李"], "city": ["Zürich", "大阪"]}
    assert read_names(path) == ("name", "city")


def test_an_error_about_the_encoding_names_its_argument_and_shows_no_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, "name,city\nÅsa,Zürich\n", encoding="cp1252")
    with pytest.raises(ConfigurationError, match="--encoding") as error:
        read_table(path)
    assert "rich" not in str(error.value) and "0x" not in str(error.value) and error.value.__cause__ is None
    assert cells(read_table(path, "cp1252"))["city"] == ["Zürich"]
    with pytest.raises(ConfigurationError, match="--encoding klingon is not known"):
        read_table(path, "klingon")
    with pytest.raises(ConfigurationError, match="utf-16"):
        read_table(written(tmp_path, "a,b\n1,x\n", encoding="utf-16-le"))  # without a mark


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_header_line_alone_decides_the_delimiter(tmp_path: Path, delimiter: str) -> None:
    rows = [["a", "b or c"], ["1;2|3", "x\ty,z"], ["3", '"']]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    table = read_table(written(tmp_path, text.getvalue()))
    assert cells(table) == {"a": ["1;2|3", "3"], "b or c": ["x\ty,z", '"']}
    assert table.decimal == ("," if delimiter == ";" else ".")


def test_quoted_line_breaks_blank_lines_and_line_ends(tmp_path: Path) -> None:
    path = written(tmp_path, 'a,"b\nc"\r\n"x\ny", "z"\r\n\r\n"1","2"\r\n')
    assert cells(read_table(path)) == {"a": ["x\ny", "1"], "b\nc": ["z", "2"]}
    assert cells(read_table(written(tmp_path, "a,b\r1,2\r3,4"))) == {"a": ["1", "3"], "b": ["2", "4"]}


def test_a_row_of_another_length_is_named_by_its_line_alone(tmp_path: Path) -> None:
    path = written(tmp_path, 'a,b\n1,"two\nlines"\nsecret,2,3\n')
    with pytest.raises(ConfigurationError, match="line 4: the row does not have as many fields") as error:
        read_table(path)
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigurationError, match="line 3: the row cannot be read"):
        read_table(written(tmp_path, f'a,b\n1,2\n1,"{"x" * 200_000}\n'))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no header"),
        ("\n1,2\n", "has no header"),
        ("a,b\n", "has a header but no rows"),
        ("a,b,a,b\n1,2,3,4\n", "2 column names more than once: a, b"),
        ("5.1,3.5\n4.9,3.0\n", "seems to be a row"),
    ],
)
def test_files_without_a_usable_header_are_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_table(written(tmp_path, content))


def test_an_unnamed_column_gets_its_number(tmp_path: Path) -> None:
    assert cells(read_table(written(tmp_path, ",x\n0,1\n"))) == {"column 1": ["0"], "x": ["1"]}
    assert cells(read_table(written(tmp_path, "0,1,2\n5,6,7\n"))) == {"0": ["5"], "1": ["6"], "2": ["7"]}
    with pytest.raises(ConfigurationError, match="is not a file"):
        read_table(tmp_path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["data.csv.packed", "data.csv"])
def test_a_compressed_file_is_read_whatever_its_name(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    packed = compress(CITIES.encode() * 100)
    path = written(tmp_path, packed, name)
    assert read_names(path) == ("name", "city") and cells(read_table(path))["city"][:2] == ["Zürich", "大阪"]
    with pytest.raises(ConfigurationError, match="damaged"):
        read_table(written(tmp_path, packed[:-20], name))


def test_archives_and_spreadsheets_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.xlsx", "w") as archive:
        archive.writestr("sheet", "a,b")
    old = written(tmp_path, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "data.xls")
    for path in (tmp_path / "data.xlsx", old):
        with pytest.raises(ConfigurationError, match="a ZIP archive or a spreadsheet, not a CSV file"):
            read_table(path)


def test_a_quote_that_is_open_at_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a double quote is open at the end"):
        read_table(written(tmp_path, 'a,b\n1,yes\n2,"yes\n3,no\n'))
    assert cells(read_table(written(tmp_path, 'a,b\n1,"yes"')))["b"] == ["yes"]


def test_a_header_that_runs_into_the_rows_shows_none_of_them(tmp_path: Path) -> None:
    path = written(tmp_path, '"a,b\n1,secret\n2,secret\n3,"x"\n')
    for read in (read_names, read_table):
        with pytest.raises(ConfigurationError, match="line 1: the header cannot be read") as error:
            read(path)
        assert "secret" not in str(error.value)


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=8))
def test_what_csv_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("first", "second"), *rows])
    path = written(tmp_path_factory.mktemp("csv"), text.getvalue())
    assert cells(read_table(path)) == {"first": [a for a, _ in rows], "second": [b for _, b in rows]}


def test_parquet_gives_the_same_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import datetime

    import pyarrow.parquet as parquet

    path = tmp_path / "data.parquet"
    columns = {
        "n": [1.5, None, -2.0],
        "i": [1, 2, 3],
        "t": ["a", "ü", None],
        "b": [True, False, None],
        "d": [datetime.date(2020, 1, 2), None, datetime.date(1999, 12, 31)],
        "c": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
    parquet.write_table(pa.table(columns), path)
    table = read_table(path)
    assert read_names(path) == ("n", "i", "t", "b", "d", "c") and table.rows == 3 and table.format == "Parquet"
    found = cells(table)
    assert [float(x) for x in found["n"] if x] == [1.5, -2.0] and found["i"] == ["1", "2", "3"]
    assert found["t"] == ["a", "ü", ""] and found["b"] == ["true", "false", ""] and found["c"] == ["x", "y", "x"]
    assert found["d"] == ["2020-01-02", "", "1999-12-31"]
    parquet.write_table(pa.table({"a": [1], "nested": [[1, 2]]}), path)
    with pytest.raises(ConfigurationError, match="'nested' is of type list"):
        read_table(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigurationError, match="cannot be read as Parquet"):
        read_table(path)


@pytest.mark.slow
def test_many_rows_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    with path.open("w") as file:
        file.write("id,a,b,c\n")
        file.writelines(f"{i},{i % 97},{i * 0.37},{'yes' if i % 3 else 'no'}\n" for i in range(200_000))
    start = time.process_time()
    assert read_table(path).rows == 200_000
    assert time.process_time() - start < 10
