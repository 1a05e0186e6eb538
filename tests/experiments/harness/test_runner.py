"""What a command runs, in which order, and what it keeps."""

import dataclasses
import json

import pytest

from clipwise.errors import ConfigurationError
from experiments.batch_clipping import paper, tuned
from experiments.harness.runner import Options, reproduce
from experiments.index import PAPERS


def said():
    lines = []
    return lines, lines.append


def test_a_second_command_runs_only_what_is_missing(tmp_path, fake):
    options = Options("batch-clipping", tmp_path, figures=("4",), quick=True)
    reproduce(options, said()[1])
    first = len(fake)
    assert first == paper.QUICK_ROWS
    reproduce(options, said()[1])
    assert len(fake) == first
    reproduce(dataclasses.replace(options, retry=True), said()[1])
    assert len(fake) == first + 1, "only what failed"
    reproduce(dataclasses.replace(options, seeds=2), said()[1])
    assert len(fake) == 2 * first + 1


def test_machines_can_share_a_grid_by_rows(tmp_path, fake):
    lines, say = said()
    store = reproduce(Options("batch-clipping", tmp_path, figures=("4",), quick=True, only="BC, enhanced"), say)
    rows = {place["row"] for cell in store.cells.values() for place in cell["shown"]}
    assert rows and all("BC, enhanced" in row for row in rows) and len(fake) < paper.QUICK_ROWS
    assert not any("time is up" in line for line in lines), "the requested runs are finished"
    assert "--only 'BC, enhanced'" in (tmp_path / "results.json").read_text()


def test_figures_share_runs(tmp_path, fake):
    reproduce(Options("batch-clipping", tmp_path, figures=("4", "18"), quick=True), said()[1])
    keys = [setting.key for setting, _ in fake]
    assert len(keys) == len(set(keys)) == 2 * paper.QUICK_ROWS - 1
    text = (tmp_path / "results.md").read_text()
    assert "| BC, enhanced, C = 0.095 | 66.66% (figure 18) | 50.00 |" in text and "| ALC | 66.66% | 50.00 |" in text


def test_a_row_that_fails_is_reported_and_the_others_run(tmp_path, fake):
    store = reproduce(Options("batch-clipping", tmp_path, figures=("4",), quick=True), said()[1])
    failed = [cell["failed"] for cell in store.cells.values() if "failed" in cell]
    assert failed == ["ValueError: no such thing"]
    assert "| BC, Zhang | below enhanced | ValueError: no such thing |" in (tmp_path / "results.md").read_text()


def test_settings_are_chosen_by_validation_and_tested_once_per_seed(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(paper, "QUICK_METHODS", ("IC, flat, group norm",))
    rates = [s.noise_rate for s in tuned.trials("IC, flat, group norm", 8.0)]
    reproduce(Options("batch-clipping", tmp_path, figures=(tuned.NAME,), quick=True), said()[1])
    assert [(s.noise_rate, held_out) for s, held_out in fake] == [(rates[0], 144), (rates[1], 144), (rates[1], 360)]
    assert "| IC, flat, group norm | 70.00 |" in (tmp_path / "results.md").read_text()


def test_quick_short_and_full_runs_are_not_mixed(tmp_path, fake, everywhere_digits):
    reproduce(Options("batch-clipping", tmp_path, figures=("2",), quick=True), said()[1])
    reproduce(Options("batch-clipping", tmp_path, figures=("2",), epochs=2), said()[1])
    assert "| m = 64 | 90.24% | 50.00 | 0 | 2 of 50 |" in (tmp_path / "results.md").read_text()
    reproduce(Options("batch-clipping", tmp_path, figures=("2",)), said()[1])
    assert "| m = 64 | 90.24% | 50.00 | 0 | 10 of 50 |" in (tmp_path / "results.md").read_text()
    assert len(fake) == 6


def test_when_the_time_is_up_nothing_is_lost_or_made_up(tmp_path, fake):
    lines, say = said()
    store = reproduce(Options("batch-clipping", tmp_path, figures=("B",), quick=True, budget_seconds=0), say)
    assert not store.cells and not fake and "time is up" in lines[0]
    assert "Appendix B, recomputed" in (tmp_path / "results.md").read_text()


def test_shortened_epochs_are_shown(tmp_path, fake, everywhere_digits):
    reproduce(Options("batch-clipping", tmp_path, figures=("B",), epochs=3), said()[1])
    assert {setting.epochs for setting, _ in fake} == {3} and {s.data for s, _ in fake} == {"mnist"}
    assert "| 3 of 50 |" in (tmp_path / "results.md").read_text()


def test_files_name_no_folder(tmp_path, fake, everywhere_digits):
    reproduce(Options("batch-clipping", tmp_path / "out", figures=("2",), data=tmp_path), said()[1])
    for file in ("results.json", "results.md"):
        text = (tmp_path / "out" / file).read_text()
        assert str(tmp_path) not in text and "--data DIR" in text
    assert json.loads((tmp_path / "out" / "results.json").read_text())["environments"][0]["versions"]["torch"]


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("data", [None, "nowhere", "."])
def test_a_missing_data_set_ends_the_command_and_is_no_result(tmp_path, monkeypatch, name, data):
    monkeypatch.delenv("CLIPWISE_DATA", raising=False)
    folder = None if data is None else tmp_path / data
    lines, say = said()
    with pytest.raises(ConfigurationError, match=r"--data DIR|does not exist|holds no"):
        reproduce(Options(name, tmp_path / "out", data=folder), say)
    assert not (tmp_path / "out").exists() and not lines


def test_earlier_results_are_shown_where_a_data_set_is_missing(tmp_path, monkeypatch, fake):
    monkeypatch.delenv("CLIPWISE_DATA", raising=False)
    reproduce(Options("batch-clipping", tmp_path, figures=("4",), quick=True), said()[1])
    (tmp_path / "results.md").unlink()
    lines, say = said()
    with pytest.raises(ConfigurationError, match="--data DIR"):
        reproduce(Options("batch-clipping", tmp_path, figures=("4",)), say)
    assert lines == [f"wrote {tmp_path / 'results.md'}"] and (tmp_path / "results.md").exists()


def test_a_text_that_is_in_no_row_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"only='BC enhanced' is in no row's name.*such as 'BC, "):
        reproduce(Options("batch-clipping", tmp_path, figures=("4",), quick=True, only="BC enhanced"), print)
    assert not list(tmp_path.iterdir())
