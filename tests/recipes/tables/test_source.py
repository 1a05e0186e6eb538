from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Event
from clipwise.recipes.counts import NoisedCounts, ReleasedCounts
from clipwise.recipes.tables import Schema, TableEncoder, TableSource
from clipwise.recipes.tables.schema import Category, Number, Target
from clipwise.recipes.tables.source import LABELS


def table(folder: Path, rows: Sequence[Sequence[object]], header: str = "age,city,y", name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def people(count: int, seed: int = 0) -> list[tuple[object, ...]]:
    random = np.random.default_rng(seed)
    ages, cities = random.integers(18, 80, count), random.choice(["Rom", "Paris", "Ulm"], count)
    return [(a, c, "yes" if a > 45 else "no") for a, c in zip(ages, cities, strict=True)]


def counts(z: float = 3.0, log: list[Event] | None = None) -> NoisedCounts:
    return NoisedCounts(z, (log if log is not None else []).append, delta=1e-6, key=NoiseKey.from_seed(1))


def every(source: TableSource) -> np.ndarray:
    return np.arange(len(source))


class Fixed(NoisedCounts):
    """Gives what was released before, whatever the rows are."""

    def __init__(self, released: ReleasedCounts) -> None:
        super().__init__(3.0, lambda event: None, delta=1e-6)
        self._released = released

    def release(self, *given: Any) -> ReleasedCounts:
        return self._released


class Kept(NoisedCounts):
    """Records the requested and the released counts."""

    asked: tuple[Mapping[str, tuple[np.ndarray, int]], Mapping[str, Sequence[str | None]]]
    released: ReleasedCounts

    def release(self, *given: Any) -> ReleasedCounts:
        self.asked, self.released = (given[0], given[1]), super().release(*given)
        return self.released


def test_one_line_without_a_schema(tmp_path: Path) -> None:
    log: list[Event] = []
    source = TableSource(table(tmp_path, people(3000)), "y")
    assert source.needs_counts() and source.description == "a CSV table with the columns age, city; target: y"
    encoder = source.prepare(every(source), counts(log=log))
    assert len(log) == 1 and log[0].noise_multiplier == 3.0 and log[0].excess == 1e-6
    assert encoder.task.labels == ("no", "yes") and len(encoder.preprocessing) == 4
    assert encoder.preprocessing[1].startswith("age: a number, with quantiles from ")
    dataset = encoder.encode(source, np.arange(0, 3000, 2))
    x, y = dataset.tensors
    assert x.shape == (1500, encoder.width) and x.dtype == torch.float32 and set(y.tolist()) == {0, 1}
    assert torch.equal(x, encoder.inputs(source)[0][::2])
    assert np.corrcoef(x[:, 0], y)[0, 1] > 0.7


def test_the_encoding_depends_on_rows_only_through_the_released_counts(tmp_path: Path) -> None:
    kept = Kept(3.0, lambda event: None, delta=1e-6, key=NoiseKey.from_seed(2))
    source = TableSource(table(tmp_path, people(2000)), "y", balanced=True)
    before = source.prepare(every(source), kept)
    others = table(tmp_path, [(i * 1e6, f"c{i}", f"label {i}") for i in range(2000)], name="other.csv")
    replaced = TableSource(others, "y", balanced=True)
    assert replaced.prepare(every(replaced), Fixed(kept.released)).to_dict() == before.to_dict()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_neighbours_change_each_histogram_in_one_bin_by_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cell = st.sampled_from(["", "1", "-2.5", "2020-01-01", "x", "大阪"])
    rows = data.draw(st.lists(st.tuples(cell, cell, cell), min_size=2, max_size=6))
    source = TableSource(table(tmp_path_factory.mktemp("t"), rows), "y", schema=Schema.undeclared(["age", "city"]))
    left_out = data.draw(st.integers(0, len(rows) - 1))
    asked = []
    for chosen in (every(source), np.delete(every(source), left_out)):
        kept = Kept(0.05, lambda event: None, delta=1e-6)
        with suppress(ConfigurationError):  # the noise may hide all labels
            source.prepare(chosen, kept)
        asked.append(kept.asked)
    assert list(asked[0][0]) == list(asked[1][0]) == ["age", "city", "y"] and list(asked[0][1]) == [LABELS]
    for name in asked[0][0]:
        (one_N, bins), (two_N, same) = asked[0][0][name], asked[1][0][name]
        assert bins == same
        change = np.bincount(one_N[one_N >= 0], minlength=bins) - np.bincount(two_N[two_N >= 0], minlength=bins)
        assert np.abs(change).sum() <= 1
    assert [*asked[1][1][LABELS]] == [v for i, v in enumerate(asked[0][1][LABELS]) if i != left_out]


def test_what_is_declared_needs_no_counts(tmp_path: Path) -> None:
    schema = Schema({"age": Number((0.0, 100.0)), "city": Category(("Rom", "Ulm"))}, Target("y", labels=("no", "yes")))
    source = TableSource(table(tmp_path, people(2)), schema=schema)
    assert not source.needs_counts() and len(source) == 2
    encoder = source.prepare(every(source), None)
    assert encoder.width == 6 and encoder.preprocessing == ("2 columns as declared in the schema",)
    partly = TableSource(source.path, "y", labels=["no", "yes"])
    assert partly.needs_counts()
    with pytest.raises(ConfigurationError, match="needs noised counts"):
        partly.prepare(every(partly), None)


def test_rare_and_missing_labels_have_no_loss_and_stay_in_the_data(tmp_path: Path) -> None:
    rows = [*people(2000), (30, "Rom", "once"), (31, "Rom", "")]
    source = TableSource(table(tmp_path, rows), "y")
    encoder = source.prepare(every(source), counts())
    assert encoder.task.labels == ("no", "yes") and "not trained on" in encoder.preprocessing[-1]
    y = encoder.encode(source).tensors[1]
    assert len(y) == 2002 and y[-2:].tolist() == [-1, -1]
    output = torch.zeros(2002, 2, requires_grad=True)
    losses = encoder.loss(output, y)
    assert losses.shape == (2002,) and losses[-2:].tolist() == [0, 0] and losses[0] > 0
    losses.sum().backward()
    assert output.grad is not None and output.grad[-2:].abs().sum() == 0


def test_noise_alone_adds_no_common_label(tmp_path: Path) -> None:
    schema = Schema({"age": Number((0.0, 100.0)), "city": Category(("Rom", "Ulm"))})
    source = TableSource(table(tmp_path, people(400)), "y", task="classification", schema=schema)
    for seed in range(300):
        noised = NoisedCounts(3.0, lambda event: None, delta=1e-6, key=NoiseKey.from_seed(seed))
        assert source.count(every(source), noised).target.labels == ("no", "yes")


def test_weights_of_classes_are_from_noised_counts(tmp_path: Path) -> None:
    rows = [(1, "Rom", "a" if i % 10 else "b") for i in range(3000)]
    source = TableSource(table(tmp_path, rows), "y", labels=["a", "b"], balanced=True)
    log: list[Event] = []
    encoder = source.prepare(every(source), counts(log=log))
    assert log[0].excess == 0  # labels are given: no threshold is needed
    assert encoder.label_weights == (pytest.approx(0.556, abs=0.02), pytest.approx(5.0, abs=0.5))
    assert encoder.preprocessing[-1].startswith("weights of 2 declared labels by noised counts")
    y = encoder.encode(source).tensors[1]
    assert encoder.loss(torch.zeros(3000, 2), y)[0] == pytest.approx(5.0 * np.log(2), rel=0.1)


def test_regression_for_numbers_with_many_values_or_on_request(tmp_path: Path) -> None:
    rows = [(i % 60, "Rom", i % 500 / 10) for i in range(5000)]
    path = table(tmp_path, rows)
    source = TableSource(path, "y")
    encoder = source.prepare(every(source), counts())
    assert encoder.task.labels is None and encoder.task.range is not None
    low, high = encoder.task.range
    assert low <= 1 and 49 <= high < 70
    y = encoder.encode(source).tensors[1]
    assert y.dtype == torch.float32 and y[:3].tolist() == pytest.approx([max(low, 0.0), max(low, 0.1), max(low, 0.2)])
    output = encoder.model("mlp")(torch.zeros(4, encoder.width)).detach()
    assert output.shape == (4,) and low < float(output[0]) < high
    assert encoder.loss(torch.tensor([high, low]), torch.tensor([low, float("nan")])).tolist() == [4, 0]
    few = table(tmp_path, [(1, "Rom", i % 2) for i in range(3000)], name="few.csv")
    source = TableSource(few, "y")
    assert source.prepare(every(source), counts()).task.labels == ("0", "1")
    source = TableSource(few, "y", task="regression")
    assert source.prepare(every(source), counts()).task.range == (0.0, pytest.approx(1.2, abs=0.2))
    source = TableSource(path, "y", task="classification")
    with pytest.raises(ConfigurationError, match="--labels"):
        source.prepare(every(source), counts(30.0))


def test_hard_columns(tmp_path: Path) -> None:
    rows = [
        (f"id{i}", 7, "" if i % 3 else i, f"2020-{i % 12 + 1:02}-01", 10**300 * (i % 2), "Zürich 大阪", i % 2)
        for i in range(4000)
    ]
    source = TableSource(table(tmp_path, rows, "id,constant,gaps,day,huge,town,y"), "y")
    encoder = source.prepare(every(source), counts())
    kinds = {name: kind.kind for name, kind in encoder.schema.columns.items()}
    assert kinds["constant"] == kinds["gaps"] == kinds["huge"] == "number"
    assert kinds["day"] == "date" and kinds["town"] == "hashed" and kinds["id"] in ("ignored", "hashed")
    x = encoder.inputs(source)[0]
    assert torch.isfinite(x).all() and x.abs().max() <= 1


def test_two_rows_give_a_clear_message_or_a_model(tmp_path: Path) -> None:
    path = table(tmp_path, people(2))
    source = TableSource(path, "y")
    with pytest.raises(ConfigurationError, match=r"With 2 training rows .*--labels"):
        source.prepare(every(source), counts(10.0))
    source = TableSource(path, "y", labels=["no", "yes"])
    encoder = source.prepare(every(source), counts(10.0))
    assert "noise hides" in encoder.preprocessing[1] and encoder.inputs(source)[0].shape == (2, encoder.width)


def test_without_privacy_the_preparation_names_no_noise(tmp_path: Path) -> None:
    source = TableSource(table(tmp_path, people(50)), "y")
    encoder = source.prepare(every(source), counts(0.0))
    assert [("exact counts" in line, "nois" in line) for line in encoder.preprocessing] == [
        (True, False),
        *[(False, False)] * 2,
        (True, False),
    ]


def test_further_tables_are_read_in_the_encoding_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe,y\n".encode("latin-1") + b"1,no\n2,yes\n")
    schema = Schema({"größe": Number((0.0, 3.0))}, Target("y", labels=("no", "yes")))
    source = TableSource(path, schema=schema, encoding="latin-1")
    encoder = TableEncoder.from_dict(source.prepare(every(source), None).to_dict())
    assert len(encoder.open(path)) == 2
    with pytest.raises(ConfigurationError, match="not text in utf-8"):
        encoder.open(path, "utf-8")


def test_the_encoder_is_plain_data_and_opens_further_tables(tmp_path: Path) -> None:
    source = TableSource(table(tmp_path, people(2000)), "y", balanced=True)
    encoder = source.prepare(every(source), counts())
    same = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert same.to_dict() == encoder.to_dict() and same.task == encoder.task and same.width == encoder.width
    further = same.open(table(tmp_path, [("Rom", "x", 40), ("?", "x", "")], "city,extra,age", "new.csv"))
    assert not further.has_target and same.inputs(further)[0].shape == (2, encoder.width)
    with pytest.raises(ConfigurationError, match="no column 'y'"):
        same.encode(further)
    with pytest.raises(ConfigurationError, match=r"no column 'age'"):
        same.open(table(tmp_path, [("Rom",)], "city", "bad.csv"))


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_models_and_settings(tmp_path: Path, name: str) -> None:
    source = TableSource(table(tmp_path, people(300)), "y", labels=["no", "yes"])
    encoder = source.prepare(every(source), counts())
    model = encoder.model(name)
    assert model(encoder.inputs(source)[0]).shape == (300, 2) and encoder.views(4) is None
    with pytest.raises(ConfigurationError, match="linear"):
        encoder.model("forest")
    for rows, epsilon, preset in ((2, 0.1, "fast"), (500, 1.0, "best"), (10**6, 8.0, "fast")):
        chosen = source.defaults(rows, epsilon, preset)
        assert 1 <= chosen.batch_size <= rows and chosen.epochs > 0 and 0 < chosen.counts_share < 1
        encoder.model(chosen.model)


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    path = table(tmp_path, people(3))
    for wrong, words in (
        ({"labels": ["yes"]}, "at least two labels"),
        ({"task": "ranking"}, "'classification' or 'regression'"),
        ({"schema": Schema({"height": Number((0, 1))})}, "no column 'height'"),
        ({"schema": Schema({"y": Number((0, 1))})}, "also an input"),
        ({"schema": Schema({})}, "no column beside the target"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            TableSource(path, "y", **wrong)
    source = TableSource(path, "income")
    with pytest.raises(ConfigurationError, match="no column 'income'"):
        source.prepare(every(source), counts())
    with pytest.raises(ConfigurationError, match="target is missing"):
        TableSource(path).prepare(np.arange(3), counts())
