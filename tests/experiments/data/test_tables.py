"""Tables: encoded by public constants alone, and cut by position alone."""

import gzip
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from clipwise.errors import ConfigurationError
from experiments import data
from experiments.data.encoding import Flag, Levels, Number
from experiments.data.schemas import SCHEMAS, schema

ROWS = 50


def _value(kind, row):
    if isinstance(kind, Levels):
        return kind.levels[row % len(kind.levels)]
    if isinstance(kind, Number):
        return str(kind.low + (kind.high - kind.low) * row / ROWS)
    return str(row % 2)


def write(folder, name, change=lambda row, column, value: value):
    """Invented rows that fit the schema."""
    about = schema(name)
    columns = dict(about.columns) or {"android.permission.A": Flag(), "android.permission.B": Flag()}
    for file in about.files:
        lines = [",".join([*columns, about.label])]
        for row in range(ROWS):
            values = [change(row, column, _value(kind, row)) for column, kind in columns.items()]
            lines.append(",".join([*values, about.classes[row % len(about.classes)]]))
        (folder / f"{file}.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_table_reads_and_no_record_is_lost(name, tmp_path):
    write(tmp_path, name)
    table = data.table(name, tmp_path)
    rows = ROWS * len(schema(name).files)
    x, y = table.train.tensors
    assert (len(table.train), len(table.test)) == (rows - rows // 5, rows // 5)
    assert x.shape[1] == len(table.features) == len(set(table.features))
    assert x.dtype == torch.float32 and float(x.abs().max()) <= 1
    assert int(y.max()) < len(table.classes)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_record_is_encoded_without_looking_at_the_others(name, tmp_path):
    """Another second record changes the encoding of no other record."""
    write(tmp_path, name)
    before = data.table(name, tmp_path)
    write(tmp_path, name, change=lambda row, column, value: "1e9" if row == 1 else value)
    after = data.table(name, tmp_path)
    assert before.features == after.features and before.input_norm == after.input_norm
    changed = 0
    for old, new in ((before.train, after.train), (before.test, after.test)):
        changed += int((old.tensors[0] != new.tensors[0]).any(1).sum())
    assert 1 <= changed <= len(schema(name).files)


@given(value=st.floats(allow_nan=True, allow_infinity=True), logarithmic=st.booleans())
def test_numbers_stay_between_minus_one_and_one(value, logarithmic):
    encoded = Number(-5, 100, logarithmic).encoded(np.array([value]))
    assert encoded.shape == (1, 1) and -1 <= encoded[0, 0] <= 1


@given(st.floats(-5, 100), st.floats(-5, 100), st.booleans())
def test_numbers_keep_their_order(a, b, logarithmic):
    low, high = Number(-5, 100, logarithmic).encoded(np.array(sorted((a, b))))[:, 0]
    assert low <= high


def test_ends_of_the_range_are_ends_of_the_scale():
    assert Number(2, 6).encoded(np.array([2.0, 4.0, 6.0, 7.0]))[:, 0].tolist() == [-1, 0, 1, 1]
    ends = Number(0, 1e5, logarithmic=True).encoded(np.array([0.0, 1e5]))[:, 0]
    assert np.allclose(ends, [-1, 1])


def test_a_level_that_is_not_listed_is_zero_everywhere():
    assert Levels(("a", "b")).encoded(np.array(["b", "c"])).tolist() == [[0, 1], [0, 0]]
    assert Levels(("1", "-2")).encoded(np.array([-2.0, 1.5])).tolist() == [[0, 1], [0, 0]]


def test_input_norm_follows_from_kinds_alone(tmp_path):
    write(tmp_path, "german_credit")
    kinds = schema("german_credit").columns.values()
    numbers = sum(isinstance(kind, Number) for kind in kinds)
    expected = math.sqrt(len(kinds) - numbers + numbers / 4)
    assert data.table("german_credit", tmp_path).input_norm == pytest.approx(expected)


@given(count=st.integers(1, 300), seed=st.integers(0, 9))
def test_a_cut_is_a_partition_that_the_seed_decides(count, seed):
    rows = TensorDataset(torch.arange(count))
    rest, taken = data.cut(rows, 0.2, seed)
    assert len(taken) == round(0.2 * count)
    assert sorted([*rest.tensors[0].tolist(), *taken.tensors[0].tolist()]) == list(range(count))
    assert torch.equal(taken.tensors[0], data.cut(rows, 0.2, seed)[1].tensors[0])


def test_seeds_cut_differently():
    rows = TensorDataset(torch.arange(100))
    assert not torch.equal(data.cut(rows, 0.2, 0)[1].tensors[0], data.cut(rows, 0.2, 1)[1].tensors[0])


def test_android_states_that_it_is_partial(tmp_path):
    write(tmp_path, "naticusdroid")
    assert "partial" in data.table("naticusdroid", tmp_path).note


def test_another_table_is_refused_by_column(tmp_path):
    write(tmp_path, "nursery")
    (tmp_path / "breast_cancer.csv.gz").write_bytes((tmp_path / "nursery.csv.gz").read_bytes())
    with pytest.raises(ConfigurationError, match="'breast_cancer' has no column 'benign'"):
        data.table("breast_cancer", tmp_path)
    with pytest.raises(ConfigurationError, match=r"data='iris' is not known.*'nursery'"):
        data.table("iris", tmp_path)
