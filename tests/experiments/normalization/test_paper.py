"""What the command runs of the normalization paper, in which order, and what it writes."""

import dataclasses
import json
import re

import pytest

from experiments.__main__ import main
from experiments.harness.drawing import can_draw
from experiments.harness.paper import Options
from experiments.harness.runner import reproduce
from experiments.harness.store import Store
from experiments.normalization import page, paper
from experiments.normalization import records as results_module
from experiments.normalization.paper import PAPER
from experiments.normalization.records import best_of, results
from experiments.normalization.setting import Setting
from experiments.normalization.tables import Table

SMALL = Table(
    "5",
    "Small",
    over="epsilon",
    values=(8.0,),
    families={"net": Setting(data="digits", model="lenet_300_100", epochs=1, batch_size=256)},
    methods={"no norm": {"norm": "none"}, "public": {"norm": "public"}},
    trials=({"learning_rate": 1.0}, {"learning_rate": 2.0}),
    seeds=2,
)
ENTRY = "net", "no norm", 8.0


@pytest.fixture
def declared(monkeypatch):
    """Declares the tables, in place of all."""

    def declare(*tables):
        monkeypatch.setattr(paper, "TABLES", tables)
        monkeypatch.setattr(results_module, "TABLES", tables)
        monkeypatch.setattr(page, "FIGURE_1", {})

    return declare


@pytest.fixture
def one_entry(declared):
    declared(dataclasses.replace(SMALL, methods={"no norm": {"norm": "none"}}))


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    found.begin("a command", {"cpu": "a machine"})
    return found


def keep(store, task, **cell):
    result = {"setting": task.setting.key, "judged_by": task.judged_by}
    store.add(task.key, result | cell)


def needed(store, **given):
    """What the runner would begin."""
    options = Options("normalization", "out", **given)
    return [task for task in PAPER.tasks(options, store.cells) if task.key not in store.cells]


# ------------------------------------------------------------------ trials, then tested runs


def test_trials_come_first_then_the_best_of_them_is_tested(one_entry, store):
    trials = needed(store)
    assert [(task.setting.learning_rate, task.judged_by) for task in trials] == [
        (1.0, "validation"),
        (2.0, "validation"),
    ]
    keep(store, trials[0], accuracy=0.5)
    assert needed(store) == trials[1:]
    keep(store, trials[1], accuracy=0.6)
    tested = needed(store)
    assert [(task.setting.learning_rate, task.judged_by, task.seed) for task in tested] == [
        (2.0, "test", 0),
        (2.0, "test", 1),
    ]
    assert len(needed(store, seeds=7)) == 7, "in place of what the table has"
    for task in tested:
        keep(store, task, accuracy=0.55)
    assert needed(store) == []
    assert len(results(SMALL, store)[ENTRY]) == 2


def test_an_entry_without_a_finished_trial_has_the_reason(one_entry, store):
    for task in needed(store):
        keep(store, task, failed="refused: so")
    assert needed(store) == []
    assert results(SMALL, store)[ENTRY][0]["failed"] == "refused: so"


def test_an_entry_shows_nothing_before_its_trials_are_complete(one_entry, store):
    first, second = needed(store)
    keep(store, first, accuracy=0.5)
    keep(store, dataclasses.replace(first, judged_by="test"), accuracy=0.5)
    assert results(SMALL, store) == {}
    keep(store, second, accuracy=0.1)
    assert len(results(SMALL, store)[ENTRY]) == 1


def test_one_setting_needs_no_trial(declared, store):
    declared(dataclasses.replace(SMALL, trials=SMALL.trials[:1]))
    assert {task.judged_by for task in needed(store)} == {"test"}


def test_the_first_of_equal_trials_is_taken():
    assert best_of([{"accuracy": 0.5}, {"accuracy": 0.5}, {"failed": "x"}]) == 0
    assert best_of([{"failed": "x"}, {"accuracy": 0.1}]) == 1
    assert best_of([{"failed": "x"}]) is None


# ---------------------------------------------------------------------------- the command


@pytest.mark.integration
def test_it_runs_continues_and_ends(declared, tmp_path, capsys):
    declared(SMALL)
    words = ["normalization", "--table", "5", "--out", str(tmp_path)]
    assert main([*words, "--budget-seconds", "0"]) == 0
    assert "the time is up" in capsys.readouterr().out and not (tmp_path / "results.json").exists()
    assert main(words) == 0
    assert capsys.readouterr().out.count("seed") == 8  # two methods: two trials, two tested runs
    assert main([*words, "--seeds", "3"]) == 0
    assert capsys.readouterr().out.count("seed") == 2  # the third seed of each, and nothing again
    text = (tmp_path / "results.md").read_text()
    assert "net, public against no norm" in text and "± " in text and "not run" not in text
    assert "    python -m experiments normalization --table 5 --device cpu --seeds 3\n" in text
    assert (tmp_path / "table-5-net.svg").exists() == can_draw()


def test_runs_of_another_folder_are_taken_over(one_entry, tmp_path):
    lines = []
    reproduce(Options("normalization", tmp_path / "one"), lines.append)
    before = len(lines)
    found = reproduce(Options("normalization", tmp_path / "two", take=(tmp_path / "one",)), lines.append)
    assert len(found.cells) == 4 and not any("seed" in line for line in lines[before:])


@pytest.mark.integration
def test_several_processes_give_the_same_grid(declared, tmp_path):
    declared(dataclasses.replace(SMALL, trials=SMALL.trials[:1], seeds=1))
    found = reproduce(Options("normalization", tmp_path, workers=2), lambda _: None)
    assert len(found.cells) == 2 and not any("failed" in cell for cell in found.cells.values())
    assert json.loads((tmp_path / "results.json").read_text())["cells"].keys() == found.cells.keys()


def test_a_missing_data_set_ends_the_command_and_is_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CLIPWISE_DATA", raising=False)
    assert main(["normalization", "--table", "5", "--out", str(tmp_path)]) == 2
    assert "--data DIR" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "8"], r"table='8' is not known: use one of 5, .*6-scratch"),
        (["--figure", "2"], r"figure='2' is not known: use one of 1\."),
        (["--epochs", "1"], "--epochs is not possible with normalization"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, message):
    assert main(["normalization", *arguments, "--out", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_figure_1_takes_its_columns_alone(tmp_path):
    found = list(PAPER.tasks(Options("normalization", tmp_path, figures=("1",)), {}))
    assert {task.place.figure for task in found} == {"table-2", "table-3"}
    assert {task.setting.norm for task in found} == {"batch"}


def test_quick_runs_take_small_tables_by_default(tmp_path):
    def figures(*asked):
        options = Options("normalization", tmp_path, figures=asked, quick=True)
        return {task.place.figure for task in PAPER.tasks(options, {})}

    assert figures() == {"table-5", "table-2", "table-7", "table-4"}
    assert figures("table-3") == {"table-3"}
