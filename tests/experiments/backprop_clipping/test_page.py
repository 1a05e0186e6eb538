"""The page and the pictures of all figures, from made-up results."""

import json
from pathlib import Path

import pytest

from experiments.backprop_clipping import page, plots
from experiments.backprop_clipping.grid import SIGNALS
from experiments.harness.search import Asked
from experiments.harness.store import FILE, FORMAT, Store
from tests.experiments.backprop_clipping.made import everything

LAYERS = ("0", "3", "7", "9")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every run has an accuracy that its key decides."""

    def accuracy(one: Asked) -> float:
        return 0.5 + 0.4 * (sum(map(ord, one.key)) % 97) / 97

    cells = everything((), accuracy)
    for key, cell in cells.items():
        if "withdrawn" in key:
            cell["epsilon"] = 0.09 if "honest" in key else 2100.0
        if "signal " in key:
            layer = {"gradient": 2.0, "signal": 0.1 * (1 + SIGNALS.index(_method(key))), "noise": 0.4}
            cell["curve"] = [{"step": step, "layers": dict.fromkeys(LAYERS, layer)} for step in (0, 5, 9)]
    folder = tmp_path_factory.mktemp("made")
    versions = {"torch": "2"}
    environment = {"cpu": "one", "python": "3", "versions": versions}
    made = {"format": FORMAT, "commands": ["a command"], "environments": [environment], "cells": cells}
    (folder / FILE).write_text(json.dumps(made))
    return Store(folder)


def _method(key: str) -> str:
    return next(m for m in SIGNALS if f"/{m} " in key)


def test_the_page_has_every_table_and_no_gap(store: Store) -> None:
    text = page.markdown(store, quick=False)
    for title in (
        "Table 1",
        "The withdrawn setting",
        "Figure 5",
        "The best for each epsilon",
        "Signal and noise per layer",
        "Settings that were chosen",
    ):
        assert f"## {title}" in text
    assert "not run" not in text
    rows = text.splitlines()
    # What is printed stands where the paper has it: its own method at its epsilon, DP-SGD at that of DP-SGD.
    assert sum("98.7, withdrawn" in row for row in rows) == 1
    assert any(row.startswith("| mnist | backprop, the paper's bound, clip | 0.07 | 98.7, withdrawn") for row in rows)
    assert any(row.startswith("| cifar10 | DP-SGD, tanh | 7.53 | 66.2 |") for row in rows)
    assert "| mnist | as published | 0.07 | 2.1e+03: none in effect | 98.7 |" in text
    assert text.count("The last layer alone") == 3
    assert "0 0.25 against 0.75" in text  # signal over noise


def test_quick_runs_are_not_mixed_with_others(store: Store) -> None:
    text = page.markdown(store, quick=True)
    assert "## Table 1" not in text and "quick run" in text


def test_pictures_are_drawn(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plots.plot_all(store, False, tmp_path)
    assert [file.name for file in files] == ["figure-5.svg", "figure-signal.svg"]
    assert all("<svg" in file.read_text() for file in files)
    assert plots.plot_all(store, True, tmp_path) == []
