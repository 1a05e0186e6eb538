"""Sentences on which of the paper's gains survive, computed from the runs."""

from __future__ import annotations

from collections.abc import Iterator

from clipwise.layers.public_batchnorm import PUBLIC_KINDS
from experiments.harness.results import CLEAR, Measured, measured
from experiments.normalization.claims import number
from experiments.normalization.records import Results
from experiments.normalization.tables import Table

BASELINE, PAPERS_BATCH_NORM = "no norm", "batch norm"
BORNE = 1.0  # points that an accuracy may lose and still count as kept


def findings(table: Table, found: Results) -> list[str]:
    """A line for each finding."""
    return list(_gains(table, found) if table.over == "epsilon" else _robustness(table, found))


# ------------------------------------------------------------------------- private


def _gains(table: Table, found: Results) -> Iterator[str]:
    for family in table.families:
        for method in table.methods:
            if method != BASELINE:
                line = _survival(table, found, family, method)
                if line:
                    yield line
        yield from _best(table, found, family)


def _survival(table: Table, found: Results, family: str, method: str) -> str:
    """Where a method's gain over no norm is as large as in the paper, smaller, or absent."""
    by_verdict: dict[str, list[str]] = {}
    for value in table.values:
        gain = _gain(found, family, method, BASELINE, value)
        if gain is not None:
            claim = claimed_gain(table, family, method, value)
            beside = "" if claim is None else f", paper {claim:+.2f}"
            by_verdict.setdefault(verdict(gain, claim), []).append(f"epsilon {value:g} ({gain.signed()}{beside})")
    words = (f"{word} at {', '.join(places)}" for word, places in by_verdict.items())
    return f"{family}, {method} against no norm: " + "; ".join(words) + "." if by_verdict else ""


def claimed_gain(table: Table, family: str, method: str, value: float) -> float | None:
    """The paper's gain of a method over no norm. Kinds of public statistics are compared with its batch norm."""
    column = PAPERS_BATCH_NORM if method in PUBLIC_KINDS else method
    with_norm = number(table.claims.get((family, column), {}).get(value, ""))
    without = number(table.claims.get((family, BASELINE), {}).get(value, ""))
    return None if with_norm is None or without is None else with_norm - without


def verdict(gain: Measured, claim: float | None) -> str:
    """Whether there is a clear gain, and whether the claim is clearly above it."""
    if gain.error is None:
        return "one seed, so no verdict"
    if Measured(-gain.mean, gain.error).exceeds(0):
        return "a loss"
    if not gain.exceeds(0):
        return "no clear difference"
    if claim is None or claim <= 0:
        return "a gain"
    falls_short = claim - gain.mean > CLEAR * gain.error
    return "the gain survives in part" if falls_short else "the gain survives in full"


def _best(table: Table, found: Results, family: str) -> Iterator[str]:
    """Whether public statistics are better than group norm, which needs no public data."""
    for kind in (method for method in table.methods if method in PUBLIC_KINDS):
        words = []
        for value in table.values:
            gain = _gain(found, family, kind, "group norm", value)
            if gain is not None:
                words.append(f"{gain.signed()} at epsilon {value:g}")
        if words:
            yield f"{family}, {kind} against group norm: {', '.join(words)}."


def _gain(found: Results, family: str, method: str, other: str, value: float) -> Measured | None:
    one, two = (measured(found.get((family, name, value), [])) for name in (method, other))
    return None if one is None or two is None else one - two


# --------------------------------------------------------------------- noisy weights


def _robustness(table: Table, found: Results) -> Iterator[str]:
    for family in table.families:
        for method in table.methods:
            ours: dict[float, float | None] = {}
            for value in table.values:
                known = measured(found.get((family, method, value), []))
                if known is not None:
                    ours[value] = known.mean
            if 0.0 in ours and len(ours) > 1:
                claims = {v: number(c) for v, c in table.claims.get((family, method), {}).items()}
                paper = f"; the paper says {_borne(claims)}" if claims else ""
                yield f"{family}, {method}: {_borne(ours)}{paper}."


def _borne(accuracies: dict[float, float | None]) -> str:
    """The noise up to which at most a point is lost, and the accuracy at the largest noise. None is a failure."""
    first = accuracies[0.0]
    assert first is not None
    most = 0.0
    for noise in sorted(accuracies):
        here = accuracies[noise]
        if here is None or first - here > BORNE:
            break
        most = noise
    last = accuracies[max(accuracies)]
    left = "nothing" if last is None else f"{last:.2f}"
    kept = f"keeps {first:.2f} within {BORNE:g} point up to noise {most:g}"
    return f"{kept}, and {left} is left at noise {max(accuracies):g}"
