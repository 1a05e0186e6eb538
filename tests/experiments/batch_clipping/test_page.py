"""The page of results."""

import json

import pytest

from experiments.batch_clipping import appendix, page, plots, tuned
from experiments.batch_clipping.budgets import budgets
from experiments.harness.store import Store


def test_the_papers_settings_have_their_true_epsilon():
    """The lines of appendix B are the same by both ways, up to the last step that is not full."""
    lines = {
        (b.setting.model, b.setting.sigma, b.setting.batch_size, b.epochs): b
        for b in budgets()
        if b.setting.norm != "none"
    }
    for line in appendix.recomputed():
        budget = lines["bn_lenet5", line.stated.sigma, 64, 50]
        assert budget.parts == 8 and "B" in budget.figures
        assert budget.epsilon == pytest.approx(line.epsilon, rel=1e-3)
        assert budget.flat_epsilon == pytest.approx(line.flat_epsilon, rel=1e-3)
    headline = lines["resnet18", 0.01875, 64, 50]
    assert headline.parts == 62 and 9e4 < headline.epsilon < 8e6 and {"4", "18"} <= set(headline.figures)


def run(store, key, figure, row, **cell):
    result = {"seed": 0, "epochs": 12, "setting": key, "judged_by": "test", "seconds": 1.0}
    store.add(key, result | cell)
    store.show(key, {"figure": figure, "row": row, "epochs_asked": 50, "quick": False})


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    versions = {"clipwise": "0", "torch": "2"}
    found.begin("a command", {"gpu": "a GPU", "cores": 16, "python": "3.11", "versions": versions})
    curve = {"public_accuracy_by_epoch": [0.2, 0.3]}
    run(found, "a", "18", "ALC", accuracy=0.5, epsilon=9e4, **curve)
    run(found, "b", "18", "FGC, equal privacy", accuracy=0.6, epsilon=9e4, **curve)
    run(found, "c", "18", "FGC, equal noise", unfinished=True, **curve)
    run(found, "d", "1", "m = 64", accuracy=0.9, norms_by_epoch=[{"w": 1.0}, {"w": 0.5}], **curve)
    return found


def test_a_page_has_runs_conclusions_and_how_it_was_made(store):
    text = page.markdown(store, quick=False)
    assert "    a command\n" in text and "On a GPU, 16 cores, Python 3.11, clipwise 0, torch 2." in text
    assert "| ALC | 66.66% | 50.00 | 0 | 12 of 50 | 9e+04: none in effect |" in text
    assert "unfinished: 30.0 on the public tenth after 2 epochs" in text
    assert "(figure 18, equal privacy): 50.00 against 60.00, not tested (one seed, 12 of 50 epochs, " in text
    assert "| cifar10 | resnet18 | 0.01875 | 64 | 50 | 62 |" in text


def test_plots_are_written_where_they_can_be(store, tmp_path):
    pytest.importorskip("matplotlib")
    files = plots.plot_all(store, False, tmp_path)
    assert {file.name for file in files} == {"figure-18.svg", "figure-1.svg", "layer-norms.svg"}
    assert all(file.stat().st_size > 1000 for file in files)
    assert json.loads((tmp_path / "results.json").read_text())["format"] == 1


def test_without_matplotlib_there_is_no_plot(store, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert plots.plot_all(store, False, tmp_path) == []


def test_no_digit_is_flipped_at_equal_epsilon():
    assert all(not (s.augmented and s.flipped) for s in tuned.METHODS.values())
    assert any(s.augmented for s in tuned.METHODS.values())


def test_a_row_that_was_withdrawn_is_not_shown(store):
    known, withdrawn = "IC, flat, group norm", "IC, flat, group norm, 4 views"
    for method in (known, withdrawn):
        for judged_by in ("validation", "test"):
            key = f"{judged_by} {method}"
            result = {
                "seed": 0,
                "epochs": 6,
                "setting": method,
                "judged_by": judged_by,
                "seconds": 1.0,
                "accuracy": 0.9,
            }
            store.add(key, result)
            place = {"figure": tuned.NAME, "row": method, "budget": 3.0, "epochs_asked": 6, "quick": False}
            store.show(key, place)
    text = page.markdown(store, quick=False)
    assert f"| {known} | 90.00 |" in text and withdrawn not in text


def test_what_is_not_pld_is_marked(store):
    run(store, "g", "18", "ALC", accuracy=0.5, epsilon=7.5e6, noise_multiplier=0.00238)
    text = page.markdown(store, quick=False)
    assert "| at most 7.5e+06 (not PLD): none in effect |" in text  # of a run
    (line,) = (row for row in text.splitlines() if row.startswith("| cifar10 | resnet18 | 0.01875 | 64 | 50 | 62 |"))
    assert "(not PLD)" in line.split("|")[7] and "not PLD" not in line.split("|")[8]
