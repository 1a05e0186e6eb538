from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from clipwise.recipes.tables.schema import (
    Auto,
    Category,
    Date,
    Hashed,
    Ignored,
    Kind,
    Mixed,
    Number,
    Schema,
    Target,
    read_schema,
    write_toml,
)

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
texts = st.lists(text, unique=True, max_size=4).map(tuple)
points = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6).map(
    lambda p: tuple(sorted(p))
)
bounds = st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=2, unique=True).map(lambda p: tuple(sorted(p)))
kinds: st.SearchStrategy[Kind] = st.one_of(
    st.builds(Number, st.one_of(bounds, points.filter(lambda p: len(p) != 2))),
    st.builds(Category, texts),
    st.integers(1, 40).flatmap(
        lambda b: st.builds(Hashed, st.just(b), st.sets(st.integers(0, b - 1)).map(lambda k: tuple(sorted(k))))
    ),
    st.lists(st.integers(-700_000, 2_000_000).map(float), min_size=2, max_size=2, unique=True).map(
        lambda p: Date(*sorted(p))
    ),
    st.builds(Mixed, points.filter(lambda p: len(p) != 2), st.integers(1, 9)),
    st.just(Ignored()),
    st.just(Auto()),
)
targets = st.one_of(
    st.none(),
    st.builds(Target, text, st.sampled_from([None, "classification", "regression"])),
    st.builds(Target, text, labels=st.lists(text, unique=True, min_size=2, max_size=4).map(tuple)),
    st.builds(Target, text, range=bounds),
)
schemas = st.builds(Schema, st.dictionaries(text, kinds, max_size=4), targets, texts)
some = {"columns": {"a": {"kind": "auto"}}}


@settings(max_examples=100, deadline=None)
@given(schemas, text)
def test_a_schema_survives_the_file(tmp_path_factory: pytest.TempPathFactory, schema: Schema, comment: str) -> None:
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    printable = "".join(c for c in comment if c.isprintable())
    comments = dict.fromkeys([*schema.columns, "[target]"], f"{printable}\n{printable}")
    path.write_text(write_toml(schema, comments, head=printable), encoding="utf-8", newline="")
    assert read_schema(path) == schema
    assert Schema.from_dict(schema.to_dict()) == schema


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"colums": {}}, "'colums' is not known"),
        ({"format": 9}, "format is not known"),
        ({"columns": {"a": {"kind": "float"}}}, "column 'a': kind must be one of number"),
        ({"columns": {"a": {"kind": "number"}}}, "column 'a': a number needs bounds"),
        ({"columns": {"a": {"kind": "number", "bounds": [5, 5]}}}, "column 'a', bounds: .*smaller one first"),
        ({"columns": {"a": {"kind": "number", "bounds": [0, float("inf")]}}}, "column 'a', bounds: .*finite"),
        ({"columns": {"a": {"kind": "number", "quantiles": [3, 2, 4]}}}, "rising order"),
        ({"columns": {"a": {"kind": "category", "values": ["x", "x"]}}}, "different texts"),
        ({"columns": {"a": {"kind": "category", "values": [1, 2]}}}, "in quotes"),
        ({"columns": {"a": {"kind": "hashed", "buckets": 0}}}, "buckets: give a whole number"),
        ({"columns": {"a": {"kind": "hashed", "buckets": 4, "kept": [4]}}}, "from 0 to 3"),
        ({"columns": {"a": {"kind": "date", "bounds": ["yesterday", "today"]}}}, "give two dates"),
        ({"columns": {"a": {"kind": "date", "bounds": ["2021-01-01", "2020-01-01"]}}}, "before the second"),
        (some | {"target": {"labels": ["a", "b"]}}, "name is missing"),
        (some | {"target": {"name": "y", "labels": ["a"]}}, "at least two labels"),
        (some | {"target": {"name": "y", "task": "ranking"}}, "'classification' or 'regression'"),
        (some | {"target": {"name": "y", "range": [1, 0]}}, "smaller one first"),
        (some | {"target": {"name": "y", "task": "regression", "labels": ["a", "b"]}}, "labels belong to"),
        (some | {"target": {"name": "y", "task": "classification", "range": [0, 1]}}, "range belongs to"),
    ],
)
def test_mistakes_are_named(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Schema.from_dict(data)


def test_files_that_are_no_schema_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_schema(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[columns\n")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_schema(tmp_path / "bad.toml")


def test_dates_may_be_dates_of_toml(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text('[columns.day]\nkind = "date"\nbounds = [1970-01-02, 1970-02-01]\n')
    assert read_schema(path).columns == {"day": Date(1.0, 31.0)}
