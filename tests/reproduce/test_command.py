"""`clipwise reproduce` and `python -m clipwise.reproduce`."""

import json

import pytest

from clipwise.commands.reproduce import reproduce as command
from clipwise.errors import ConfigurationError
from clipwise.reproduce.batch_clipping import paper
from clipwise.reproduce.store import Store


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"figure='19' is not known.*equal-epsilon"):
        command("batch-clipping", figure=["19"], out=tmp_path)
    with pytest.raises(ConfigurationError, match=r"paper='other' is not known.*batch-clipping"):
        command("other", out=tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not a file of such results"):
        Store(tmp_path)


def test_the_quick_mode_runs(tmp_path, monkeypatch):
    """For real, on two rows and one method."""
    monkeypatch.setattr(paper, "QUICK_FIGURES", ("B",))
    monkeypatch.setattr(paper, "QUICK_ROWS", 2)
    monkeypatch.setattr(paper, "QUICK_METHODS", ("BC, flat, batch norm",))
    command("batch-clipping", quick=True, out=tmp_path)
    cells = json.loads((tmp_path / "results.json").read_text())["cells"].values()
    assert len(cells) == 5 and not any("failed" in cell for cell in cells)
    text = (tmp_path / "results.md").read_text()
    assert "shows that everything works, and nothing else" in text
    assert "| ALC, sigma 2.5 | 50.38%, said to be 0.52-GDP |" in text and "| 2.5 | 1.513 | 1.514 |" in text
