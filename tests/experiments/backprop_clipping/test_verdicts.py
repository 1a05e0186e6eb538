"""Sentences follow from numbers."""

import pytest

from experiments.backprop_clipping import verdicts
from experiments.backprop_clipping.grid import SIGNALS
from experiments.backprop_clipping.records import Results
from experiments.backprop_clipping.search import Row
from experiments.backprop_clipping.trial import BACKPROP, OPEN
from experiments.harness import verdicts as words
from experiments.harness.results import Measured
from experiments.harness.search import Asked
from tests.experiments.backprop_clipping.made import everything


def made(ours: float, theirs: float = 0.9, open_: float = 0.95) -> Results:
    """Backpropagation clipping has one accuracy everywhere, DP-SGD another; seeds differ a little."""

    def accuracy(one: Asked) -> float:
        method = getattr(one.job, "method", "")
        mean = open_ if method in OPEN else ours if method in BACKPROP else theirs
        return mean + 0.001 * one.seed

    return Results(everything(("table-1", "5"), accuracy), quick=False)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every row had been searched well enough for a verdict."""
    monkeypatch.setattr(words, "TRIALS_PER_DIMENSION", 0)


def test_few_trials_in_many_dimensions_are_no_verdict() -> None:
    results = made(0.95)
    for sentences in (verdicts.headline, verdicts.against_dp_sgd, verdicts.near_no_noise, verdicts.price_of_clips):
        for sentence in sentences(results):
            assert f"**{words.NOT_TESTED} (9 trials in 6 dimensions" in sentence, sentence
    for sentence in verdicts.our_changes(results):
        assert f"{words.NOT_TESTED}: 9 trials in " in sentence


def test_few_seeds_are_no_verdict(searched: None) -> None:
    found = everything(("table-1",), lambda _: 0.9)
    kept = {key: cell for key, cell in found.items() if cell["judged_by"] == "validation" or cell["seed"] == 0}
    (sentence,) = verdicts.headline(Results(kept, quick=False))
    assert "**Not tested (one seed).**" in sentence


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize(
    ("ours", "word"), [(0.95, "Survives.**"), (0.9, "Does not survive.**"), (0.8, "Does not survive.**")]
)
def test_the_comparison_with_dp_sgd(ours: float, word: str) -> None:
    (sentence,) = verdicts.against_dp_sgd(made(ours))
    assert word in sentence
    count = 6 + 5 + 3
    expected = {
        0.95: "above DP-SGD in 14",
        0.9: "in 14 (",
        0.8: f"above DP-SGD in 0 of {count} places, below it in 14",
    }[ours]
    assert expected in sentence


def test_the_headline(searched: None) -> None:
    (high,), (low,) = verdicts.headline(made(0.99)), verdicts.headline(made(0.5))
    assert "**Survives.**" in high and "**Does not survive.**" in low
    assert "mnist 50.45 ± 0.10% where 98.7% is printed, at epsilon 0.07" in low
    (between,) = verdicts.headline(made(0.75))
    assert "**Survives in part.**" in between


def test_small_epsilons(searched: None) -> None:
    usable, near = verdicts.near_no_noise(made(0.949))
    assert "**Survives.**" in usable and "**Survives.**" in near
    usable, near = verdicts.near_no_noise(made(0.9))
    assert "**Survives.**" in usable and "**Does not survive.**" in near
    assert "cifar10" in near and "cifar10" not in usable  # whose smallest epsilon is 1


def test_the_best_is_chosen_on_the_validation_part() -> None:
    def accuracy(one: Asked) -> float:
        method = getattr(one.job, "method", "")
        if one.judged_by == "validation":
            return 0.8 if method == "upstream-normalize" else 0.7
        return 0.6 if method == "upstream-normalize" else 0.9

    results = Results(everything(("table-1",), accuracy), quick=False)
    ours, _ = verdicts.best_pair(results, "mnist", 0.07)
    assert ours == Row("mnist", "upstream-normalize", 0.07)


def test_a_difference_needs_two_standard_errors() -> None:
    assert [Measured(p, 1.0).verdict for p in (2.1, 1.9, -1.9, -2.1)] == [1, 0, 0, -1]
    assert Measured(50.0, None).verdict == 0  # one run gives no standard error


def test_signals_are_compared_for_each_layer() -> None:
    def curve(signal: float, grown: float) -> list[dict]:
        layer = {"signal": signal, "noise": 2.0}
        return [
            {"step": k, "layers": {"0": {**layer, "gradient": g}, "3": {**layer, "gradient": g}}}
            for k, g in enumerate((1.0, grown))
        ]

    found = everything(("signal",), lambda _: 0.5)
    for method, (signal, grown) in zip(SIGNALS, ((1.0, 2.0), (6.0, 1.0), (0.5, 3.0), (4.0, 4.0)), strict=True):
        key = next(k for k in found if "signal " in k and f"/{method} " in k)
        found[key]["curve"] = curve(signal, grown)
    per_layer, flat, growth = verdicts.signal_to_noise(Results(found, quick=False))
    assert "(one run): more in 2 of 2 layers.**" in per_layer and "0 0.5 against 0.25" in per_layer
    assert "(one run): more in 0 of 2 layers.**" in flat and "0.5 against 2" in flat
    assert "normalize: 0 3 against 2" in flat  # reported, and no part of the verdict
    assert "(one run): less than" in growth and "2.00 times" in growth
    del found[next(k for k in found if "signal " in k and "/upstream-clip " in k)]
    sentences = verdicts.signal_to_noise(Results(found, quick=False))
    assert len(sentences) == 3 and all("**Not run.**" in sentence for sentence in sentences)


def test_the_price_of_clips_is_that_of_the_papers(searched: None) -> None:
    def accuracy(one: Asked) -> float:
        return {"plain": 0.95, "clipped": 0.95, "clipped-upstream": 0.90}.get(getattr(one.job, "method", ""), 0.5)

    (sentence,) = verdicts.price_of_clips(Results(everything(("table-1",), accuracy), quick=False))
    assert "**Does not survive.**" in sentence and "mnist -5.0 ± 0.0 points (-0.1 in the paper)" in sentence


def test_without_runs_there_is_no_verdict() -> None:
    empty = Results({}, quick=False)
    for sentences in (
        verdicts.headline,
        verdicts.against_dp_sgd,
        verdicts.near_no_noise,
        verdicts.price_of_clips,
        verdicts.our_changes,
        verdicts.withdrawn_setting,
        verdicts.signal_to_noise,
    ):
        assert sentences(empty) == []
