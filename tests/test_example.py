import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch

from clipwise.engine import checkpoint
from clipwise.ledger import ledger

SOURCE = Path(__file__).parent.parent / "examples" / "train.py"


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("example_train", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)


def test_it_is_short():
    assert len(SOURCE.read_text().splitlines()) < 150


@pytest.mark.slow
def test_it_runs_twice(example, capsys):
    for number in (1, 2):
        example.main(["--quick"])
        folder = Path(f"runs/example/run-00{number}")
        assert ledger.read(folder / "ledger").position == 3
        statement = json.loads((folder / "statement.json").read_text())
        assert statement["spent"]["steps"] == 3 and statement["spent"]["epsilon"] <= 8
        assert set(checkpoint.load(folder / "checkpoint.pt")) == {"private", "model", "epochs"}
    printed = capsys.readouterr().out
    assert "test accuracy" in printed and "epsilon so far (RDP)" in printed and "Privacy statement" in printed


@pytest.mark.slow
def test_it_continues_where_it_stopped(example, capsys):
    example.main(["--epochs", "2", "--stop-after", "1"])
    stopped = checkpoint.load("runs/example/run-001/checkpoint.pt")
    assert stopped["epochs"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a resumption that is not exact would warn
        example.main(["--epochs", "2", "--resume"])
    finished = checkpoint.load("runs/example/run-001/checkpoint.pt")
    assert finished["epochs"] == 2 and ledger.read("runs/example/run-001/ledger").position == 6
    assert not any(torch.equal(stopped["model"][k], finished["model"][k]) for k in stopped["model"])
    assert [p.name for p in Path("runs/example").iterdir()] == ["run-001"]


def test_without_a_run_there_is_nothing_to_resume(example):
    with pytest.raises(SystemExit, match="no run"):
        example.main(["--resume"])
