"""The declared tables."""

import dataclasses
import re
from pathlib import Path

import pytest

from experiments.normalization import sets
from experiments.normalization.claims import number
from experiments.normalization.setting import Setting
from experiments.normalization.tables import TABLES, quick

BY_NAME = {table.name: table for table in TABLES}


def test_tables_2_to_7_are_there_and_the_two_that_matter_come_first():
    assert [table.name for table in TABLES[:2]] == ["5", "2"]
    assert {table.name for table in TABLES} == {"2", "3", "4", "5", "5-microbatches", "6", "6-scratch", "7"}
    for table in TABLES:
        assert bool(table.shortened) == (table.name not in ("2", "5")), table.name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_columns_that_are_left_out_are_named(table):
    kinds = {"no norm": "none", "layer norm": "layer", "group norm": "group"}
    if table.over == "epsilon":
        kinds |= {kind: kind for kind in ("public", "self+public", "public-exact")}
    else:
        kinds |= {"batch norm": "batch"}
    run = {changes["norm"] for changes in table.methods.values()}
    named = table.shortened.partition("; columns not run: ")[2].split(", ")
    assert [name for name in named if name] == [name for name, kind in kinds.items() if kind not in run]


def test_the_readme_counts_the_runs():
    """Each entry has one run per trial, if there are several, and one per seed."""
    text = (Path(__file__).parents[3] / "experiments/normalization/README.md").read_text()
    found = dict(re.findall(r"^\| (\S+) \| (\d[\d,]* \| \d[\d,]*) \|$", text, re.MULTILINE))
    expected = {}
    for table in TABLES:
        entries = [
            table.tried(family, method, value)
            for family in table.families
            for method in table.methods
            for value in table.values
        ]
        runs = sum(len(tried) * (len(tried) > 1) + table.seeds for tried in entries)
        epochs = sum(
            sum(s.epochs for s in tried) * (len(tried) > 1) + table.seeds * max(s.epochs for s in tried)
            for tried in entries
        )
        expected[table.name] = f"{runs:,} | {epochs:,}"
    assert found == expected


def test_tables_2_and_5_are_in_full():
    assert BY_NAME["2"].values == (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 10.0) and BY_NAME["2"].seeds >= 5
    assert BY_NAME["5"].values == (7.0, 3.0, 1.0, 0.5, 0.1, 0.05) and BY_NAME["5"].seeds >= 5
    assert {"no norm", "layer norm", "group norm", "public", "self+public", "public-exact"} <= set(BY_NAME["5"].methods)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_method_has_the_same_trials(table):
    def tried(family, method):
        settings = table.tried(family, method, table.values[0])
        return [(s.learning_rate, s.epochs, s.batch_size) for s in settings]

    for family in table.families:
        assert len({tuple(tried(family, method)) for method in table.methods}) == 1


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_private_rows_have_statistics_of_a_batch_only_where_it_is_clipped_and_group_norm_is_a_row(table):
    private = table.over == "epsilon"
    for changes in table.methods.values():
        assert (private and changes["norm"] == "batch") == (changes.get("clip") == "batch")
    assert not private or "group" in [changes["norm"] for changes in table.methods.values()]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_claims_are_numbers_of_families_that_are_run(table):
    for (family, _), claims in table.claims.items():
        assert family in table.families or family.startswith("light VGG")
        assert all(claim == "fails" or 0 < number(claim) < 100 for claim in claims.values())


def test_the_papers_gain_of_batch_norm():
    claims = BY_NAME["5"].claims
    assert number(claims["LeNet-5", "batch norm"][1.0]) - number(claims["LeNet-5", "no norm"][1.0]) == 3.5


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Setting)])
def test_settings_that_differ_have_other_keys(field):
    usual = Setting()
    value = getattr(usual, field)
    other = "other" if isinstance(value, str) else not value if isinstance(value, bool) else 7
    assert usual.but(**{field: other}).key != usual.key


def test_quick_needs_no_data_and_every_table_has_a_quick_form():
    for table in map(quick, TABLES):
        assert len(table.values) == 1 and table.seeds == 1
        assert {s.data for s in table.families.values()} <= {"digits", sets.MADE_UP}
