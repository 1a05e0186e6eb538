"""What is concluded, from invented runs."""

import pytest

from experiments.harness.results import Measured, measured
from experiments.normalization.findings import findings, verdict
from experiments.normalization.tables import TABLES

BY_NAME = {table.name: table for table in TABLES}


def test_mean_and_standard_error():
    found = measured([{"accuracy": 0.9}, {"accuracy": 0.94}, {"failed": "x"}])
    assert found.mean == pytest.approx(92) and found.error == pytest.approx(2)
    assert measured([{"accuracy": 0.9}]).error is None and measured([]) is None
    assert (Measured(5, 3) - Measured(1, 4)).error == 5


@pytest.mark.parametrize(
    ("mean", "error", "claim", "words"),
    [
        (4.0, 0.5, 3.5, "the gain survives in full"),
        (3.0, 0.5, 3.5, "the gain survives in full"),
        (2.0, 0.5, 3.5, "the gain survives in part"),
        (0.9, 0.5, 3.5, "no clear difference"),
        (-1.1, 0.5, 3.5, "a loss"),
        (2.0, 0.5, None, "a gain"),
        (2.0, 0.5, -1.0, "a gain"),
        (2.0, None, 3.5, "one seed, so no verdict"),
    ],
)
def test_verdicts_come_from_numbers(mean, error, claim, words):
    assert verdict(Measured(mean, error), claim) == words


def runs(*accuracies):
    return [{"accuracy": value} for value in accuracies]


def test_private_findings_name_the_claim():
    found = {
        ("LeNet-5", "no norm", 1.0): runs(0.90, 0.91),
        ("LeNet-5", "public-exact", 1.0): runs(0.95, 0.96),
        ("LeNet-5", "group norm", 1.0): runs(0.96, 0.97),
    }
    words = "\n".join(findings(BY_NAME["5"], found))
    assert "public-exact against no norm: the gain survives in full at epsilon 1 (+5.00 ± 0.71, paper +3.50)" in words
    assert "public-exact against group norm: -1.00 ± 0.71 at epsilon 1" in words


def test_noise_findings_state_how_much_is_tolerated():
    found = {
        ("LeNet-5", "batch norm", noise): runs(accuracy)
        for noise, accuracy in ((0.0, 0.99), (0.1, 0.985), (1.0, 0.97), (2.0, 0.985))
    }
    (words,) = findings(BY_NAME["2"], found)
    assert "keeps 99.00 within 1 point up to noise 0.1, and 98.50 is left at noise 2" in words
    assert "the paper says keeps 99.20 within 1 point up to noise 2" in words
