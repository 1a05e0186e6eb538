"""Pieces of pages."""

from experiments.harness import report


def test_mean_and_standard_error():
    cells = [{"accuracy": a} for a in (0.5, 0.6, 0.7)]
    assert report.accuracy(cells) == "60.00 ± 5.77"
    assert report.accuracy([{"failed": "why"}]) == "why"


def test_a_run_in_a_line():
    cell = {"accuracy": 0.5, "seconds": 2.0, "epsilon": 1.0, "steps": 4}
    assert report.in_short(cell) == "50.0%, epsilon 1, 2 s (500.0 ms per step)"
    open_run = {"accuracy": 0.5, "seconds": 2.0, "epsilon": None, "why_no_epsilon": "no privacy"}
    assert report.in_short(open_run) == "50.0%, no privacy, 2 s"
    assert report.in_short({"failed": "why"}) == "why"
