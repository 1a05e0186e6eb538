"""Pieces of pages."""

from clipwise.reproduce import report


def test_mean_and_standard_error():
    cells = [{"accuracy": a} for a in (0.5, 0.6, 0.7)]
    assert report.accuracy(cells) == "60.00 ± 5.77"
    assert report.accuracy([{"failed": "why"}]) == "why"
