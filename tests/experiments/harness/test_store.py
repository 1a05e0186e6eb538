"""Results of several folders."""

from experiments.harness.store import Store


def store(folder, machine, **cells):
    found = Store(folder)
    found.begin(f"command on {machine}", {"device": machine})
    for key, cell in cells.items():
        found.add(key, cell)
        found.show(key, {"figure": machine})
    return found


def test_runs_of_another_folder_are_taken_over(tmp_path):
    mine = store(tmp_path / "a", "cpu", both={"accuracy": 0.1}, begun={"unfinished": True})
    other = store(tmp_path / "b", "cuda", both={"accuracy": 0.2}, begun={"accuracy": 0.3}, new={"accuracy": 0.4})
    mine.take(other)
    again = Store(tmp_path / "a")
    assert {key: cell["accuracy"] for key, cell in again.cells.items()} == {"both": 0.1, "begun": 0.3, "new": 0.4}
    assert [again.environments[again.cells[key]["environment"]]["device"] for key in ("both", "begun", "new")] == [
        "cpu",
        "cuda",
        "cuda",
    ]
    assert again.cells["both"]["shown"] == [{"figure": "cpu"}, {"figure": "cuda"}]
    assert again.commands == ["command on cpu", "command on cuda"]


def test_what_was_begun_does_not_take_the_place_of_what_is_finished(tmp_path):
    mine = store(tmp_path / "a", "cpu", run={"accuracy": 0.1})
    mine.take(store(tmp_path / "b", "cuda", run={"unfinished": True}))
    assert mine.cells["run"]["accuracy"] == 0.1 and mine.cells["run"]["environment"] == 0


def test_a_new_result_stays_where_the_old_one_was_shown(tmp_path):
    mine = store(tmp_path, "cpu", run={"unfinished": True})
    mine.add("run", {"accuracy": 0.5})
    assert Store(tmp_path).cells["run"]["shown"] == [{"figure": "cpu"}]


def test_a_command_that_made_no_run_is_not_named(tmp_path):
    mine = store(tmp_path / "a", "cpu")
    mine.take(store(tmp_path / "b", "cuda", run={"accuracy": 0.5}))
    again = Store(tmp_path / "a")
    assert again.commands == ["command on cuda"]
    assert again.environments == [{"device": "cuda"}]
