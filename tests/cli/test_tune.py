"""`clipwise tune` on the digits that ship with clipwise."""

import pytest
from typer.testing import CliRunner

from clipwise.cli.app import app

SCRIPT = "from clipwise.tune import Range\nSPACE = {'x': Range(0, 1)}\ndef train(s): return s['x'], 1 + s['x']\n"


def call(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.mark.slow
def test_a_script_gets_its_front_and_the_cost_is_printed(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(SCRIPT)
    found = call(tmp_path / "mine.py", "--trials", 3, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "Runs on the Pareto front" in found.output and "no guarantee" in found.output
    assert (tmp_path / "out" / "mine" / "front.md").exists()


def test_the_function_of_a_script_may_have_another_name(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(SCRIPT.replace("def train", "def other"))
    found = call(f"{tmp_path / 'mine.py'}:other", "--trials", 1, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    found = call(tmp_path / "mine.py", "--trials", 1, "--out", tmp_path / "out")
    assert found.exit_code == 2 and "train(settings), which returns" in found.output.replace("\n", " ")


@pytest.mark.slow
def test_a_recipe_is_tuned_and_its_runs_compose(tmp_path):
    pytest.importorskip("optuna")
    found = call("digits", "--trials", 2, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "releasing all 2 models would cost epsilon" in found.output.replace("\n", " ")


@pytest.mark.slow
def test_an_accounted_search_prints_its_cost_and_not_the_number_of_runs(tmp_path, monkeypatch):
    from clipwise.accounting import Repetitions

    monkeypatch.setattr(Repetitions, "draw", lambda self, random=None: 2)
    options = ("--accounted", "--epsilon", 4, "--mean-runs", 3, "--sample-rate", 0.25, "--epochs", 1)
    out = tmp_path / "new" / "folder"
    found = call("digits", *options, "--out", out)
    assert found.exit_code == 0, found.output
    assert "The whole search costs epsilon 4 at delta 1e-05" in found.output
    assert "noised validation accuracy" in found.output and "2 runs" not in found.output
    assert (out / "best.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("iris",), "'iris' is not a recipe or a script: give digits, or a file that ends in .py"),
        (("digits", "--epsilon", 2), "--epsilon requires --accounted"),
        (("digits", "--epochs", 2), "--epochs requires --accounted"),
        (("digits", "--accounted", "--trials", 5), "--trials is not possible with --accounted"),
        (("digits", "--seed", -1), "--seed"),
        (("mine.py", "--accounted"), "requires a recipe"),
        (("mine.py:train", "--accounted"), "requires a recipe"),
        (("mine.py:train",), "does not exist"),
        (("digits", "--accounted", "--mean-runs", 1), "mean_runs must be"),
        (("digits", "--accounted", "--mean-runs", "nan"), "mean_runs must be"),
        (("digits", "--accounted", "--mean-runs", "inf"), "mean_runs must be"),
        (("digits", "--accounted", "--epsilon", "nan"), "epsilon must be a finite number"),
        (("digits", "--accounted", "--epsilon", "inf"), "epsilon must be a finite number"),
        (("digits", "--accounted", "--sample-rate", 0), "sample_rate must be"),
        (("digits", "--accounted", "--sample-rate", 1.5), "sample_rate must be"),
        (("digits", "--accounted", "--sample-rate", "nan"), "sample_rate must be"),
    ],
)
def test_invalid_subjects_and_options_are_refused_in_one_line(arguments, message, tmp_path):
    found = call(*arguments, "--out", tmp_path / "out")
    assert found.exit_code == 2 and message in found.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


SPACE = "from clipwise.tune import Range, Choice\nSPACE = {'x': Choice((1, 2))}\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("x = (", "mine.py raised SyntaxError"),
        ("import no_such_module", "mine.py raised ModuleNotFoundError in mine.py, line 1"),
        (SPACE + "def train(s): raise ValueError('no luck')", "raised ValueError in mine.py, line 3: no luck"),
        (SPACE + "def train(s): return 'good'", "mine.py: train(settings) must return (accuracy, epsilon)"),
        (SPACE + "def train(s): return 95.0, 1", "mine.py: train(settings) returned an accuracy that is not a number"),
    ],
)
def test_errors_of_a_script_are_reported_in_one_line(tmp_path, script, message):
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(script)
    found = call(tmp_path / "mine.py", "--trials", 1, "--out", tmp_path / "out")
    assert found.exit_code == 2 and message in found.output.replace("\n", " "), found.output
    assert "Traceback" not in found.output


def test_an_invalid_study_or_another_space_is_refused(tmp_path):
    pytest.importorskip("optuna")
    script, out = tmp_path / "mine.py", tmp_path / "out"
    script.write_text(SPACE + "def train(s): return 0.5, 1.0")
    assert call(script, "--trials", 1, "--out", out).exit_code == 0
    script.write_text(script.read_text().replace("(1, 2)", "(1, 2, 3)"))
    found = call(script, "--trials", 2, "--out", out)
    assert found.exit_code == 2 and "SPACE has changed since this study began, at 'x'" in found.output
    (out / "study.db").write_text("junk")
    found = call(script, "--trials", 2, "--out", out)
    assert found.exit_code == 2 and "cannot be opened as a study" in found.output.replace("\n", " ")


def test_a_second_study_in_a_folder_leaves_the_results_of_the_first(tmp_path):
    pytest.importorskip("optuna")
    out = tmp_path / "out"
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
        found = call(tmp_path / f"{name}.py", "--trials", 1, "--out", out)
        assert found.exit_code == 0, found.output
    assert f"wrote {out / 'second' / 'front.md'}" in found.output.replace("\n", "")
    assert "# first:" in (out / "first" / "front.md").read_text()
    assert "# second:" in (out / "second" / "front.md").read_text()


def test_scripts_of_one_name_and_two_spaces_are_not_mixed(tmp_path):
    pytest.importorskip("optuna")
    for folder, text in (("a", SCRIPT), ("b", SCRIPT.replace("'x'", "'y'"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "z.py").write_text(text)
    out = tmp_path / "out"
    assert call(tmp_path / "a" / "z.py", "--trials", 1, "--out", out).exit_code == 0
    before = (out / "z" / "results.json").read_text()
    found = call(tmp_path / "b" / "z.py", "--trials", 2, "--out", out)
    assert found.exit_code == 2 and "at 'x', 'y'" in found.output
    assert "--out" in found.output and (out / "z" / "results.json").read_text() == before


def test_help_teaches_by_example():
    found = call("--help")
    assert found.exit_code == 0 and "clipwise tune digits" in found.output
