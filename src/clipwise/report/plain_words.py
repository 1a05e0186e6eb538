"""Sentences about a run for readers who are not specialists: one source for the page, the statement and the exports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clipwise.privacy import Unit, rounded_up
from clipwise.report import wording
from clipwise.report.record import HELD_OUT, RunRecord
from clipwise.report.wording import small

PRIORS = (0.01, 0.1, 0.5)
FALSE_ALARMS = 0.01

NOT_PRIVATE_TITLE = "No privacy guarantee"
SCALE = "Below 1 is strong, 1 to 10 is usual for trained models, and far above 10 the guarantee is weak."

PARALLEL = (
    "Training rows and held-out rows are disjoint and are separated by row number, so one {unit} affects the releases "
    "of one of the two ledgers only. The whole run therefore costs the larger of the two budgets (parallel "
    "composition)."
)
ONE_LEDGER = (
    "All releases that used private rows are in one ledger, and the accountant composes all of them to one guarantee."
)
SPLIT = "whether a row is held out depends on its row number only, and a changed record keeps its row number"
EVALUATED = (
    "noised counts or sums over the held-out rows, and everything computed from them without the data: accuracies and "
    "their intervals"
)
NO_WEIGHTS = "not applicable: the releases of this ledger are figures about a model, not its weights"
POST_PROCESSING = (
    "Predictions, exported or fine-tuned copies on public data, averages of weights and anything else computed from "
    "the releases without the private data have the same guarantee."
)


def figure(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up."""
    return rounded_up(value, digits) if math.isfinite(value) else "infinite"


def setting(value: Any) -> str:
    """A value of the configuration: numbers without superfluous digits, lists with commas."""
    if isinstance(value, float):
        return f"{value:,.6g}".replace("e-0", "e-") if abs(value) < 1e9 else f"{value:g}"
    return ", ".join(map(setting, value)) if isinstance(value, list) else str(value)


def releases(count: int) -> str:
    """A number of releases."""
    return f"{count:,} noised release{'s' * (count != 1)}"


def unit_of(record: RunRecord) -> Unit:
    """The unit of privacy."""
    return record.ledgers[0].spent.unit if record.ledgers else Unit.RECORD


def guarantee(record: RunRecord) -> str:
    """The guarantee in one sentence, with its unit; or that there is none, and why."""
    if record.no_guarantee is not None:
        return record.no_guarantee
    unit, adjacency = unit_of(record), record.ledgers[0].spent.adjacency
    # e^epsilon overflows a float above this.
    factor = f"{rounded_up(math.exp(record.epsilon), 3)} (e^epsilon)" if record.epsilon < 700 else "e^epsilon"
    return (
        f"If any one {unit} of the data set had been {wording.CHANGED[adjacency]}, the probability of every possible "
        f"result of this run would have been the same up to a factor of {factor}, plus {small(record.delta)} (delta)."
    )


def formal(record: RunRecord) -> str:
    """The guarantee in the usual notation."""
    s = record.ledgers[0].spent
    return f"({figure(record.epsilon)}, {small(record.delta)})-differential privacy, {s.adjacency} of one {s.unit}"


def state(record: RunRecord) -> str | None:
    """A note on a run that did not end cleanly; None if it did."""
    if all(found.exact for found in record.ledgers) and record.closed:
        return None
    return (
        "The run is in progress, did not end cleanly, or had a failed step. All releases that may have happened are "
        "counted. Whether the model is the result of these releases alone was not verified."
    )


def composition(record: RunRecord) -> str:
    """How the costs of the ledgers add up to that of the run."""
    return PARALLEL.format(unit=unit_of(record)) if record.evaluation is not None else ONE_LEDGER


def detection(record: RunRecord) -> str:
    """The strongest attack at 1% false alarms, as a sentence."""
    unit, caught = unit_of(record), 100 * record.risks.power(FALSE_ALARMS)
    return (
        f"An attacker who knows all other {unit}s and raises a false alarm in 1 of 100 cases detects at most "
        f"{rounded_up(min(caught, 100.0), 3)} of 100 {unit}s that were in the data. Guessing detects 1 of 100."
    )


def odds(probability: float) -> str:
    """A probability as odds. As an upper bound it is rounded up."""
    if probability >= 1:
        return "certain"
    if probability <= 0.5:
        ratio = (1 - probability) / probability
        digits = max(0, 2 - math.floor(math.log10(ratio)))
        return f"1 to {math.floor(ratio * 10**digits + 1e-9) / 10**digits:g}"
    return f"{rounded_up(probability / (1 - probability) * (1 - 1e-12), 3)} to 1"


def not_covered(record: RunRecord) -> list[str]:
    """What the guarantee does not cover. Preparation that the run released with noise is covered."""
    noise = record.training.noise if record.training else None
    lines = list(wording.not_covered(unit_of(record), noise))
    if record.preprocessing:
        lines[0] = "preparation of the data before this run, and of declared ranges, categories or schemas"
    return lines


def value_of(line: Mapping[str, Any]) -> str:
    """A released figure: an accuracy in percent, other figures as numbers."""
    if line.get("rows") == HELD_OUT and line.get("value") == 0 and not is_share(line):
        return "too small for the noise"
    if is_share(line) and line.get("low") == 0 and line.get("high") == 1:  # a group with few rows for the noise
        return "not known"
    return _number(line.get("value"), line)


def interval_of(line: Mapping[str, Any]) -> str:
    """The interval of a released figure, with its confidence."""
    if line.get("low") is None or line.get("high") is None:
        return "no interval"
    confidence = line.get("confidence")
    level = f", {100 * confidence:g}% confidence" if isinstance(confidence, (int, float)) else ""
    return f"{_number(line['low'], line)} to {_number(line['high'], line)}{level}"


def is_share(line: Mapping[str, Any]) -> bool:
    """Whether a released figure is a share, as accuracies are."""
    return "accuracy" in str(line.get("name"))


def rows_of(record: RunRecord, line: Mapping[str, Any]) -> str:
    """Which rows a figure was computed on."""
    if line.get("rows") == HELD_OUT:
        return "private held-out rows, with noise" if record.evaluation is not None else "held-out rows"
    return {"public-test": "public test data"}.get(str(line.get("rows")), str(line.get("rows")))


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a released figure, with its group."""
    group = line.get("group")
    return str(line.get("name")) + (f" of {group}" if group is not None else "")


def result(record: RunRecord, line: Mapping[str, Any]) -> str:
    """A released figure, in one line."""
    return f"{name_of(line)} {value_of(line)} ({interval_of(line)}), on {rows_of(record, line)}"


def _number(value: Any, line: Mapping[str, Any]) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "not known"
    return f"{100 * value:.1f}%" if is_share(line) else setting(float(f"{value:.4g}"))
