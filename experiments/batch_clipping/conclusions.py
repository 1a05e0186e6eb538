"""Sentences about which conclusions of the paper hold, computed from the runs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from experiments.batch_clipping import tuned
from experiments.batch_clipping.figures import FIGURES
from experiments.batch_clipping.rows import Rows
from experiments.harness import report
from experiments.harness.store import Cell
from experiments.harness.verdicts import lacking

_ERRORS = 2.0  # standard errors from which a difference counts
_DIMENSIONS = 2  # of the search at equal epsilon: batch size and walk
_EPOCHS_IN_PAPER = {
    (figure.name, row.label): row.epochs_in_paper or row.setting.epochs for figure in FIGURES for row in figure.rows
}


@dataclass(frozen=True)
class Claim:
    """A claim that one row is better than another.

    Attributes:
        text: the claim.
        figure: the figure of both rows.
        better, worse: the rows.
        at: what both rows have in common.
    """

    text: str
    figure: str
    better: str
    worse: str
    at: str = ""


FIGURE_CLAIMS = (
    Claim("Enhanced ALC is better than Zhang's", "4", "BC, enhanced, C = 0.0095", "BC, Zhang", "equal noise"),
    Claim("BC is better than IC", "4", "BC, enhanced, C = 0.0095", "IC, enhanced, group norm", "equal noise"),
    Claim(
        "BC with enhanced ALC is better than flat IC with group norm",
        "4",
        "BC, enhanced, C = 0.0095",
        "IC, flat, group norm, equal privacy, rate times m",
        "equal privacy",
    ),
    Claim(
        "BC with Zhang's ALC is better than flat IC with group norm",
        "4",
        "BC, Zhang",
        "IC, flat, group norm, equal privacy, rate times m",
        "equal privacy",
    ),
    Claim("ALC is better than FGC", "18", "ALC", "FGC, equal noise", "equal noise"),
    Claim("ALC is better than FGC", "18", "ALC", "FGC, equal privacy", "equal privacy"),
    Claim("4 groups are better than ALC", "18", "4 groups, equal privacy", "ALC", "equal privacy"),
    Claim("Multipliers are better than ALC", "18", "multipliers (optimal), equal privacy", "ALC", "equal privacy"),
    Claim(
        "BC with enhanced ALC is better than flat IC with group norm",
        "18",
        "ALC",
        "IC, flat, group norm, equal privacy, rate times m",
        "equal privacy",
    ),
    Claim("ALC is better than FGC", "B", "ALC, sigma 2.5", "FGC, privacy of sigma 2.5", "equal privacy"),
    Claim(
        "Multipliers are better than ALC",
        "B",
        "multipliers (optimal), privacy of sigma 2.5",
        "ALC, sigma 2.5",
        "equal privacy",
    ),
    Claim("4 groups are better than ALC", "B", "4 groups, privacy of sigma 2.5", "ALC, sigma 2.5", "equal privacy"),
    Claim(
        "Freezing entries helps",
        "B",
        "FGC, sparse from half of the epochs, privacy of sigma 2.5",
        "FGC, privacy of sigma 2.5",
        "equal privacy",
    ),
    Claim(
        "BC with enhanced ALC is better than flat IC with group norm",
        "B",
        "ALC, sigma 2.5",
        "IC, flat, group norm, equal privacy, rate times m",
        "equal privacy",
    ),
    Claim("Smaller batches are better", "12", "sigma 2.5, m = 64", "sigma 2.5, m = 1024", "equal noise"),
    Claim("Batch norm helps under BC", "14", "BC, batch norm", "BC, no norm", "equal noise on each layer"),
    Claim("Batch norm is better than group norm", "14", "BC, batch norm", "BC, group norm", "equal noise"),
    *(
        Claim(
            f"A {what} is better than a constant one",
            figure,
            f"{clip}, {better}",
            f"{clip}, constant rate, constant C",
            "equal privacy",
        )
        for figure, clip in (("15", "IC"), ("16", "BC"), ("17", "IC"))
        for what, better in (
            ("diminishing rate", "diminishing rate, constant C"),
            ("diminishing C", "constant rate, diminishing C"),
        )
    ),
)

EQUAL_CLAIMS = tuple(
    Claim(text, tuned.NAME, better, worse)
    for text, better, worse in (
        ("BC with batch norm is better than IC with group norm", "BC, flat, batch norm", "IC, flat, group norm"),
        (
            "BC with enhanced ALC is better than flat IC with group norm",
            "BC, enhanced, batch norm",
            "IC, flat, group norm",
        ),
        ("Batch norm helps under BC", "BC, flat, batch norm", "BC, flat, group norm"),
        ("Enhanced ALC is better than Zhang's", "BC, enhanced, batch norm", "BC, Zhang, batch norm"),
        ("ALC is better than FGC under BC", "BC, enhanced, batch norm", "BC, flat, batch norm"),
        ("ALC is better than flat clipping under IC", "IC, enhanced, group norm", "IC, flat, group norm"),
        (
            "Multipliers (optimal) are better than ALC under BC",
            "BC, multipliers (optimal), batch norm",
            "BC, enhanced, batch norm",
        ),
        (
            "Multipliers (optimal) are better than flat clipping under IC",
            "IC, multipliers (optimal), group norm",
            "IC, flat, group norm",
        ),
        ("4 groups are better than ALC under BC", "BC, 4 groups, batch norm", "BC, enhanced, batch norm"),
        ("Many microbatches are better than one", "BC, 16 microbatches, batch norm", "BC, flat, batch norm"),
        (
            "Momentum inside microbatches is better than one clipped mean",
            "BC, momentum inside 8 microbatches, group norm",
            "BC, flat, group norm",
        ),
        ("Freezing entries helps BC", "BC, flat, batch norm, sparse", "BC, flat, batch norm"),
        ("Freezing entries helps IC", "IC, flat, group norm, sparse", "IC, flat, group norm"),
    )
)


def sentences(shown: Rows) -> list[str]:
    """For each claim with both rows run: both accuracies, and whether it holds in these runs.

    Rows of a figure have only the paper's learning rate, so they compare settings and not methods.
    """
    found = []
    for claim in FIGURE_CLAIMS:
        rows = [shown.get((claim.figure, row, None), []) for row in (claim.better, claim.worse)]
        sentence = _sentence(rows[0], rows[1], 1, _EPOCHS_IN_PAPER[claim.figure, claim.better])
        if sentence:
            where = f"figure {claim.figure}" if claim.figure[0].isdigit() else f"appendix {claim.figure}"
            found.append(f"- {claim.text} ({where}, {claim.at}): {sentence}.")
    for claim in EQUAL_CLAIMS:
        parts = []
        for budget in sorted(tuned.EPSILONS):
            cells = [shown.get((claim.figure, row, budget), []) for row in (claim.better, claim.worse)]
            trials = min(sum(c["judged_by"] == "validation" for c in of_row) for of_row in cells)
            sentence = _sentence(finals(cells[0]), finals(cells[1]), trials)
            if sentence:
                parts.append(f"at epsilon {budget:g} {sentence}")
        if parts:
            found.append(f"- {claim.text} (equal epsilon, tuned): {'; '.join(parts)}.")
    return found


def finals(cells: list[Cell]) -> list[Cell]:
    """The tested runs of the setting that did best on the validation part; a failed run if every trial failed."""
    trials = [c for c in cells if c["judged_by"] == "validation"]
    best = tuned.chosen(trials)
    return trials[:1] if best is None else [c for c in cells if c["judged_by"] == "test" and c["setting"] == best]


def _sentence(better: list[Cell], worse: list[Cell], trials: int, epochs_in_paper: int | None = None) -> str:
    """Both accuracies and a verdict; empty if one is missing or the training lengths differ.

    `trials` is the number of settings that each row was chosen from. Without enough evidence there is no verdict.
    """
    first, second = report.accuracies(better), report.accuracies(worse)
    if not first or not second or better[0]["epochs"] != worse[0]["epochs"]:
        return ""
    words = f"{report.accuracy(better)} against {report.accuracy(worse)}"
    seeds = min(len(first), len(second))
    missing = lacking(seeds, trials, _DIMENSIONS, better[0]["epochs"], epochs_in_paper)
    return f"{words}, not tested ({missing})" if missing else f"{words}, {verdict(first, second)}"


def verdict(first: list[float], second: list[float]) -> str:
    """Whether the first mean is clearly above the second."""
    difference = statistics.fmean(first) - statistics.fmean(second)
    margin = _ERRORS * math.hypot(report.standard_error(first), report.standard_error(second))
    if abs(difference) <= margin:
        return "no difference that shows"
    return "it holds" if difference > 0 else "it does not hold"
