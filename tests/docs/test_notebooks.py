"""The tutorials run, print what their pages show, and hold no trace of the machine that ran them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.documented import DOCS

TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))
REPORTS = sorted((DOCS / "gallery").glob("*.html"))
# Figures with noise in them. Only their places in the output are the same in each run.
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
ACCURACY = re.compile(r"accuracy (\d+(?:\.\d+)?)(%?)")
EPSILON = re.compile(r"epsilon[ =](\d+(?:\.\d+)?)")


def outputs(notebook: dict) -> list[str]:
    return ["".join(output["text"]) for cell in notebook["cells"] for output in cell.get("outputs", [])]


def accuracies(text: str) -> list[float]:
    return [float(value) / (100 if percent else 1) for value, percent in ACCURACY.findall(text)]


@pytest.mark.integration
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_its_page_shows(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    from tests.docs.notebooks import run

    fresh = run(path, tmp_path)
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1
    stored = json.loads(path.read_text())
    for old, new in zip(outputs(stored), outputs(fresh), strict=True):
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        assert EPSILON.findall(old) == EPSILON.findall(new)
        # Noise and weights are fresh. The largest standard deviation is 0.06, of a network that is not pretrained: a
        # difference of 0.3 from the page has a probability below 1e-6.
        assert accuracies(old) == pytest.approx(accuracies(new), abs=0.3)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_as_the_command_writes_it(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run: make notebooks"
    assert all(cell["metadata"] == {} for cell in notebook["cells"]) and "version" not in str(notebook["metadata"])
    assert 8 <= len(notebook["cells"]) <= 17
    for text in outputs(notebook):
        assert not re.search(r"/(tmp|home|root|Users)/|\b[0-9a-f]{32}\b|\x1b|Traceback", text), text


def test_each_tutorial_has_a_report_in_the_gallery() -> None:
    assert [path.stem for path in REPORTS] == [path.stem for path in TUTORIALS]
    listed = (DOCS / "gallery.md").read_text()
    for report in REPORTS:
        text = report.read_text()
        assert f"(gallery/{report.name})" in listed and f"(../gallery/{report.name})" in _named(report).read_text()
        assert len(text) < 120_000 and not re.search(r"/(tmp|home|root|Users)/|https?://(?!www\.w3\.org)", text), report


def _named(report: Path) -> Path:
    return DOCS / "tutorials" / f"{report.stem}.ipynb"
