"""`clipwise tune` on the digits that ship with clipwise."""

import pytest
from typer.testing import CliRunner

from clipwise.cli import app

SCRIPT = (
    "from clipwise.tune import Range\nSPACE = {'x': Range(0, 1)}\ndef train(s): return s['x'], 1 + s['x']\n"
)


def call(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_a_script_gets_its_front_and_the_cost_is_told(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(SCRIPT)
    found = call(tmp_path / "mine.py", "--trials", 3, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "Runs that no other beats" in found.output and "no guarantee" in found.output
    assert (tmp_path / "out" / "front.md").exists()


def test_an_accounted_search_tells_its_cost_and_not_how_many_runs_there_were(tmp_path, monkeypatch):
    from clipwise.accounting import Repetitions

    monkeypatch.setattr(Repetitions, "draw", lambda self, random=None: 2)
    options = ("--accounted", "--epsilon", 4, "--mean-runs", 3, "--sample-rate", 0.25, "--epochs", 1)
    found = call("digits", *options, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert "The whole search costs epsilon 4 at delta 1e-05" in found.output
    assert "noised validation accuracy" in found.output and "2 runs" not in found.output
    assert (tmp_path / "best.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("iris",), "'iris' is no data set and no script"),
        (("digits", "--method", "sgd"), "method='sgd' is not known"),
        (("mine.py", "--accounted"), "takes a data set by name"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(arguments, message):
    found = call(*arguments)
    assert found.exit_code == 2 and message in found.output.replace("\n", " ")


def test_help_teaches_by_example():
    found = call("--help")
    assert found.exit_code == 0 and "clipwise tune digits" in found.output
