"""`clipwise tradeoff`: upper bounds on attacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise import accounting
from tests.cli.calls import PLAN, clipwise, figure, refused

RUN = {"noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 250}


def test_it_agrees_with_the_curve() -> None:
    curve = accounting.tradeoff(**RUN)
    result = clipwise("tradeoff", *PLAN)
    for rate in (0.001, 0.01, 0.1):
        shown = figure(result, f"detects, at {100 * rate:g}% false alarms")
        assert 100 * curve.power(rate) <= shown <= 100.2 * curve.power(rate)
    shown = figure(result, "detects more often than falsely alarms by")
    assert 100 * curve.advantage() <= shown <= 100.2 * curve.advantage()
    shown = figure(result, "guesses right, if both are equally likely")
    assert 100 * curve.accuracy(0.5) <= shown <= 100.2 * curve.accuracy(0.5)
    assert curve.mu() <= figure(result, "mu =") <= 1.002 * curve.mu()
    exact = accounting.epsilon(delta=1e-5, **RUN)
    assert exact <= figure(result, "epsilon at delta 1e-05") <= 1.001 * exact


def test_json() -> None:
    curve = accounting.tradeoff(**RUN)
    plain = json.loads(clipwise("tradeoff", *PLAN, "--delta", 1e-6, "--json").stdout)
    assert plain["format"] == 1 and plain["adjacency"] == "zero-out" and plain["steps"] == 250
    assert plain["advantage"] == curve.advantage() and plain["mu"] == curve.mu()
    assert [point["false_positive_rate"] for point in plain["power"]] == [0.001, 0.01, 0.1]
    assert 1e-6 in [point["delta"] for point in plain["epsilons"]]


def test_without_noise_there_is_no_privacy() -> None:
    options = ["--noise-multiplier", 0, "--sample-rate", 0.5, "--steps", 2]
    result = clipwise("tradeoff", *options)
    assert figure(result, "guesses right, if both are equally likely") == 100
    assert "infinite" in result.stdout and "No mu" in result.stdout
    plain = json.loads(clipwise("tradeoff", *options, "--json").stdout)
    assert plain["mu"] is None and plain["epsilons"][0]["epsilon"] is None and plain["advantage"] == 1


def test_it_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert clipwise("tradeoff", *PLAN, "--plot", tmp_path / "a.svg").exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    refused(clipwise("tradeoff", *PLAN, "--plot", tmp_path / "a.pdf"), ".png", ".svg")


def test_a_plot_goes_with_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json.loads(clipwise("tradeoff", *PLAN, "--json", "--plot", tmp_path / "a.png").stdout)
    assert (tmp_path / "a.png").exists()


def test_it_has_the_table_of_all_accountants() -> None:
    result = clipwise("tradeoff", *PLAN)
    expected = accounting.epsilon(**RUN, delta=1e-5)
    assert expected <= figure(result, "PLD") <= 1.001 * expected < figure(result, "RDP")
    assert "report this one" in result.stdout
