"""`clipwise epsilon` on planned runs: every accountant and every option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import accounting
from tests.cli.calls import PLAN, clipwise, figure, line, refused


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--sample-rate", 0.01], {"sample_rate": 0.01}),
        (["--sample-rate", 0.01, "--adjacency", "add-remove"], {"sample_rate": 0.01, "adjacency": "add-remove"}),
        (["--batch-size", 10, "--dataset-size", 1000], {"sample_rate": 0.01}),
        (
            ["--batch-size", 10, "--dataset-size", 1000, "--sampling", "fixed-size"],
            {"sample_rate": 0.01, "sampling": "fixed-size"},
        ),
        (
            ["--batch-size", 10, "--dataset-size", 1000, "--sampling", "shuffled", "--adjacency", "replace-one"],
            {"sample_rate": 0.01, "sampling": "shuffled", "adjacency": "replace-one", "period": 100},
        ),
        (
            ["--batch-size", 40, "--dataset-size", 1000, "--sampling", "partition", "--microbatches", 4],
            {"sample_rate": 0.04, "sampling": "partition"},
        ),
        (
            ["--batch-size", 10, "--dataset-size", 1000, "--sampling", "truncated-poisson", "--max-batch-size", 30],
            {"sample_rate": 0.01, "sampling": "truncated-poisson", "dataset_size": 1000, "max_batch_size": 30},
        ),
        (["--sampling", "full"], {"sampling": "full"}),
    ],
)
def test_it_agrees_with_the_accountants(options: list[Any], arguments: dict[str, Any]) -> None:
    result = clipwise("epsilon", "--noise-multiplier", 1.1, "--steps", 250, "--delta", 1e-5, *options)
    for accountant in ("pld", "rdp"):
        exact = accounting.epsilon(noise_multiplier=1.1, steps=250, delta=1e-5, accountant=accountant, **arguments)
        if exact < float("inf"):
            assert exact <= figure(result, accountant.upper()) <= 1.001 * exact
    assert "report this one" in line(result, "PLD")


@pytest.mark.parametrize("command", [["epsilon"], ["tradeoff"]])
def test_the_figure_of_a_partition_states_its_assumption(command: list[str]) -> None:
    plan = ["--noise-multiplier", 1.1, "--batch-size", 40, "--dataset-size", 1000, "--steps", 5]
    said = clipwise(*command, *plan, "--sampling", "partition").stdout
    assert "each block clipped as a whole (Batch)" in said
    assert "Batch" not in clipwise(*command, *plan, "--sampling", "fixed-size").stdout


def test_an_accountant_without_a_bound_is_marked() -> None:
    sampled = clipwise("epsilon", *PLAN)
    for accountant in ("zCDP", "GDP"):
        assert "no bound: batches are sampled" in line(sampled, accountant)
    whole = clipwise("epsilon", "--noise-multiplier", 20, "--steps", 100, "--sampling", "full")
    assert figure(whole, "GDP") == figure(whole, "PLD") <= figure(whole, "zCDP")


def test_the_central_limit_is_never_called_a_bound() -> None:
    result = clipwise("epsilon", *PLAN)
    row = line(result, "central limit")
    assert "no guarantee" in row and "(" in row  # its figure is in brackets
    whole = clipwise("epsilon", "--noise-multiplier", 20, "--steps", 100, "--sampling", "full")
    assert "central limit" not in whole.stdout  # nothing to approximate


def test_a_second_opinion_is_close() -> None:
    result = clipwise("epsilon", *PLAN, "--second-opinion")
    assert figure(result, "dp-accounting") == pytest.approx(figure(result, "PLD"), rel=0.01)
    assert "dp-accounting" not in clipwise("epsilon", *PLAN).stdout


def test_epochs_are_converted_to_steps() -> None:
    common = ["epsilon", "--noise-multiplier", 1.1, "--batch-size", 100, "--dataset-size", 950]
    by_epochs, by_steps = clipwise(*common, "--epochs", 3), clipwise(*common, "--steps", 30)
    assert by_epochs.stdout == by_steps.stdout and "30 steps" in by_steps.stdout


def test_no_noise_is_no_privacy() -> None:
    result = clipwise("epsilon", "--noise-multiplier", 0, "--sample-rate", 0.1, "--steps", 1)
    assert result.exit_code == 0 and "infinite" in result.stdout and "there is no guarantee" in result.stdout


def test_delta_at_an_epsilon() -> None:
    exact = accounting.delta(noise_multiplier=1.1, sample_rate=0.01, steps=250, epsilon=0.7)
    result = clipwise("epsilon", *PLAN, "--at-epsilon", 0.7)
    assert exact <= figure(result, "At epsilon 0.7 delta is") <= 1.002 * exact
    _refused_at_once(["--at-epsilon", -1], "--at-epsilon must be")


def test_the_unit_is_named() -> None:
    assert "of one user" in clipwise("epsilon", *PLAN, "--unit", "user").stdout


def test_a_search_costs_more_than_its_run() -> None:
    result = clipwise("epsilon", *PLAN, "--repetitions", 10)
    whole = figure(result, "is released: epsilon")
    assert whole > figure(result, "RDP")
    _refused_at_once(["--repetitions", 0.5], "--repetitions must be", "greater than 1")


def _refused_at_once(options: list[Any], *words: str) -> None:
    result = clipwise("epsilon", *PLAN, *options)
    refused(result, *words)
    assert not result.stdout


@pytest.mark.parametrize(
    ("name", "kind", "begins"),
    [("a.png", "steps", b"\x89PNG"), ("a.svg", "steps", b"<?xml"), ("a.png", "profile", b"\x89PNG")],
)
def test_plots(tmp_path: Path, name: str, kind: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    result = clipwise("epsilon", *PLAN, "--plot", tmp_path / name, "--plot-kind", kind)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_kind_of_plot_needs_a_plot() -> None:
    for kind in ("steps", "profile"):
        _refused_at_once(["--plot-kind", kind], "--plot-kind needs --plot")


def test_other_endings_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    result = clipwise("epsilon", *PLAN, "--plot", tmp_path / "a.jpg")
    refused(result, ".png", ".svg")
    assert not result.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--noise-multiplier", "--ledger"]),
        (["--noise-multiplier", 1, "--steps", 1], ["--sample-rate"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1], ["--steps", "--epochs"]),
        (["--noise-multiplier", 1, "--batch-size", 10, "--steps", 1], ["--dataset-size"]),
        (["--noise-multiplier", 1, "--sample-rate", 2, "--steps", 1], ["--sample-rate must"]),
        (["--noise-multiplier", -1, "--sample-rate", 0.1, "--steps", 1], ["--noise-multiplier"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 0], ["--steps must"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--epochs", 1], ["--epochs or --steps"]),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--delta", 0], ["--delta must be"]),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--adjacency", "replace-one"],
            ["replace-one", "poisson", "zero-out"],
        ),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--sampling", "shuffled"],
            ["--sampling shuffled", "give --batch-size, not --sample-rate"],
        ),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--sampling", "full"],
            ["--sampling full takes every unit", "no --batch-size or --sample-rate"],
        ),
        (
            ["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--sampling", "truncated-poisson"],
            ["--dataset-size"],
        ),
        (["--noise-multiplier", 1, "--sample-rate", 0.1, "--steps", 1, "--dataset-size", 0], ["--dataset-size"]),
        (["--ledger", "nowhere", "--steps", 1], ["--ledger", "--delta"]),
        (["--ledger", "nowhere", "--unit", "user"], ["--ledger", "--delta"]),
        (["--ledger", "nowhere"], ["nowhere"]),
    ],
)
def test_what_it_refuses(options: list[Any], words: list[str]) -> None:
    refused(clipwise("epsilon", *options), *words)


def test_a_large_delta_is_warned_of() -> None:
    common = ["epsilon", "--noise-multiplier", 1, "--batch-size", 10, "--dataset-size", 1000, "--steps", 1]
    assert clipwise(*common).stderr == ""
    result = clipwise(*common, "--delta", 0.01)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ") and "1/N" in result.stderr and result.stderr.count("\n") == 1


EXTREMES = ("nan", "inf", "-inf", "-1", "0", "1e-320", "1e-9", "0.05", "1", "1e9", "1e308", "1e30")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(EXTREMES), min_size=4, max_size=4), st.sampled_from(["epsilon", "tradeoff"]))
def test_extreme_numbers_give_a_bound_or_an_error(values: list[str], command: str) -> None:
    names = ("--noise-multiplier", "--sample-rate", "--epochs", "--delta")
    result = clipwise(command, *(word for pair in zip(names, values, strict=True) for word in pair))
    if result.exit_code:
        refused(result)
    else:
        assert not re.search(r"\bnan\b|[│=] -\d", result.stdout)
