"""`python -m experiments`."""

import json
import re
import subprocess
import sys

import pytest

from clipwise.errors import ConfigurationError
from experiments.__main__ import main
from experiments.batch_clipping import paper
from experiments.harness.store import Store
from experiments.index import PAPERS, SCRIPTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch-clipping", "--figure", "19"], r"figure='19' is not known.*equal-epsilon"),
        (["batch-clipping", "--table", "5"], r"table='5' is not known: batch-clipping has no tables"),
        (["batch-clipping", "--seeds", "0"], "seeds=0 is not possible"),
        (["batch-clipping", "--quick", "--take", "nowhere"], "--take nowhere: there is no"),
        (["other"], r"name='other' is not known.*batch-clipping"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_results_to_take_over_must_be_there(tmp_path, capsys):
    (tmp_path / "a_file").write_text("something")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "a_file"):
        words = ["--quick", "--take", str(folder), "--out", str(tmp_path / "out")]
        assert main(["batch-clipping", *words]) == 2
        assert f"--take {folder}: there is no results.json in it" in capsys.readouterr().err


def test_a_file_of_other_results_is_refused(tmp_path):
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not a results file of this command"):
        Store(tmp_path)


@pytest.mark.integration
def test_the_quick_mode_runs(tmp_path, monkeypatch):
    """For real, on two rows and one method."""
    monkeypatch.setattr(paper, "QUICK_FIGURES", ("B",))
    monkeypatch.setattr(paper, "QUICK_ROWS", 2)
    monkeypatch.setattr(paper, "QUICK_METHODS", ("BC, flat, batch norm",))
    assert main(["batch-clipping", "--quick", "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "results.json").read_text())["cells"].values()
    assert len(cells) == 5 and not any("failed" in cell for cell in cells)
    text = (tmp_path / "results.md").read_text()
    assert "to check that everything runs" in text
    assert "| ALC, sigma 2.5 | 50.38%, said to be 0.52-GDP |" in text and "| 2.5 | 1.513 | 1.514 |" in text


def test_the_module_takes_the_same_options_without_typer(tmp_path):
    """In a fresh process, in which typer, rich and matplotlib cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'dp_accounting'): sys.modules[name] = None\n"
        "from experiments.__main__ import main\n"
        f"sys.exit(main(['batch-clipping', '--quick', '--figure', '2', '--out', {str(tmp_path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout and (tmp_path / "results.md").exists()


def test_the_module_refuses_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "a_file").write_text("something")
    assert main(["batch-clipping", "--quick", "--out", str(tmp_path / "a_file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["batch-clipping", "--quick", "--out", str(tmp_path / ("long" * 100))]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_module_ends_with_a_clean_line_where_it_refuses(tmp_path, capsys):
    assert main(["other", "--out", str(tmp_path)]) == 2
    assert "error: name='other' is not known" in capsys.readouterr().err


def test_help_lists_every_experiment_with_a_line(capsys):
    assert main(["--help"]) == main([]) == 0
    printed = capsys.readouterr().out
    for name, command in (PAPERS | SCRIPTS).items():
        assert re.search(rf"^  {name} +{re.escape(command.line)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("name", [*PAPERS, *SCRIPTS])
def test_every_experiment_has_options_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0 and f"usage: python -m experiments {name}" in capsys.readouterr().out
