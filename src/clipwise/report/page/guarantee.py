"""The parts of the page on the guarantee: its figures, how much an attacker learns, how the budget was spent."""

from __future__ import annotations

import math

from clipwise.accounting.tradeoff import Tradeoff
from clipwise.ledger import ledger, multi_run
from clipwise.report import plain_words as words
from clipwise.report import wording
from clipwise.report.page import charts
from clipwise.report.page.html import Content, Html, facts, inline, items, markup, table, tag
from clipwise.report.record import EVALUATION, LEDGER, Risks, RunRecord
from clipwise.report.series import chosen_steps, first_steps
from clipwise.report.statement import Statement

POINTS = 14
# False-alarm rates of the drawn curve, denser where it is most curved, and of its table.
DRAWN = [(n / 100) ** 2 for n in range(101)]
SHOWN = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)


def warning(record: RunRecord) -> Html | None:
    """The box at the top of a run without guarantee."""
    return None if record.no_guarantee is None else warning_box(tag("p", record.no_guarantee))


def warning_box(*content: Content) -> Html:
    """The first thing on a page with a run that has no guarantee."""
    title = tag("p", tag("strong", words.NOT_PRIVATE_TITLE))
    return tag("div", title, *content, cls="warning", role="note", aria_label=words.NOT_PRIVATE_TITLE)


def state(record: RunRecord) -> Html | None:
    """A note on a run that did not end cleanly."""
    text = words.state(record) if record.no_guarantee is None else None
    return None if text is None else tag("p", text, cls="warning", role="note")


def headline(record: RunRecord) -> Html | None:
    """The three figures at the top."""
    if record.no_guarantee is not None:
        return None
    unit, power = words.unit_of(record), record.risks.power(words.FALSE_ALARMS)
    figures = [
        (f"epsilon, at delta {wording.small(record.delta)}", words.figure(record.epsilon), words.SCALE),
        (
            "mu of Gaussian differential privacy",
            words.figure(record.risks.mu, 3),
            "An upper bound: up to delta, no attack is better than against one Gaussian release with this mu. 0 is "
            "perfect privacy, 1 is moderate, above 3 is weak.",
        ),
        (
            f"of 100 {unit}s detected, at most",
            words.figure(min(100.0, 100 * power), 3),
            "By the best attack with a false alarm in 1 of 100 cases. Guessing detects 1.",
        ),
    ]
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value, cls="value"), tag("dd", note, cls="note"))
            for name, value, note in figures
        ],
        cls="figures",
    )


def attacker(record: RunRecord) -> Html:
    """How much an attacker learns about one unit."""
    unit, risks = words.unit_of(record), record.risks
    before = (
        f"The attacker knows all other {unit}s, sees everything that this run released, and tests whether one {unit} "
        f"was in the data. An alarm is the answer yes. An attack with 1% false alarms raises one for 1 of 100 "
        f"{unit}s that were not in the data. Each figure is a bound on every possible attack."
    )
    shared = any(found.is_shared for found in record.ledgers)
    note = f"Several runs share the ledger: {wording.FIXED_RUNS}."
    return markup(
        tag("p", before),
        tag("p", note, cls="warning", role="note") if shared else None,
        tag("div", _people(record), tag("div", _beliefs(unit, risks)), cls="pair"),
    )


def _people(record: RunRecord) -> Html:
    unit = words.unit_of(record)
    caught = 100 * record.risks.power(words.FALSE_ALARMS)
    guess = "1 of 100 is detected by guessing"
    attack = f"At most {words.figure(min(caught, 100.0), 3)} of 100 are detected by the best attack"
    return tag(
        "div",
        tag("h3", "Of 100 ", unit, "s in the data"),
        tag(
            "div",
            [
                tag("figure", charts.dots(n, text), tag("figcaption", text))
                for n, text in ((1.0, guess), (caught, attack))
            ],
            cls="people",
        ),
        tag("p", "Both raise a false alarm in 1 of 100 cases.", cls="note"),
        _detected(record.risks),
    )


def _beliefs(unit: str, risks: Risks) -> Html:
    rows = []
    for prior in words.PRIORS:
        beliefs = [
            f"{100 * prior:g}%",
            *(wording.percent(risks.posterior(prior, alarms), 3) for alarms in (0.01, 0.001)),
        ]
        all_odds = [words.odds(p) for p in (prior, *(risks.posterior(prior, alarms) for alarms in (0.01, 0.001)))]
        rows.append([markup(p, tag("small", f"odds {o}")) for p, o in zip(beliefs, all_odds, strict=True)])
    head = ("before", "after an alarm, at most: attack with 1% false alarms", "attack with 0.1% false alarms")
    return table(f"Belief that the {unit} was in the data", head, rows, numeric=True)


def _detected(risks: Risks) -> Html:
    rows = [(f"{100 * rate:g}%", wording.percent(risks.power(rate))) for rate in (0.001, 0.01, 0.1)]
    rows.append(("largest difference", wording.percent(risks.advantage)))
    return table("Detection by the best attack", ("false alarms", "detected, at most"), rows, numeric=True)


def budget_chart(record: RunRecord, statement: Statement) -> Html | None:
    """Epsilon over the steps of training, by the accountant of the guarantee."""
    steps, epsilons = spent_over_steps(record, statement)
    if not all(map(math.isfinite, epsilons)):
        return None
    last, delta = words.figure(statement.spent.epsilon), wording.small(statement.spent.delta)
    lines = [charts.Line("epsilon", steps, epsilons)]
    if statement.budget is not None:
        budget = statement.budget
        lines.append(charts.Line("budget", (0, steps[-1]), (budget, budget), charts.REFERENCE))
    top = 1.08 * max(epsilons[-1], statement.budget or 0.0)
    return charts.figure(
        "budget",
        "Epsilon over the steps of training",
        f"Epsilon at delta {delta} rises from 0 to {last} over {steps[-1]:,} releases. The table below has the values.",
        lines,
        (charts.Axis("releases", steps[-1], whole=True), charts.Axis("epsilon", top)),
        (("releases", "epsilon"), [(f"{n:,}", words.figure(e)) for n, e in zip(steps, epsilons, strict=True)]),
        note=f"By the accountant of the guarantee ({statement.spent.accountant}), at delta {delta}.",
    )


def spent_over_steps(record: RunRecord, statement: Statement) -> tuple[list[int], list[float]]:
    """Numbers of steps from 0, and epsilon after each."""
    history, delta = statement.history, statement.spent.delta
    plan = ledger.read(record.path / LEDGER if record.path.is_dir() else record.path).plan
    steps = chosen_steps(history, POINTS)
    by = statement.spent.accountant
    return [0, *steps], [0.0, *(multi_run.epsilon_of(first_steps(history, n), delta, by, plan) for n in steps)]


def tradeoff_chart(record: RunRecord) -> Html:
    """The trade-off curve of the run, and of an attack if there was an audit."""
    risks = record.risks
    lines = [
        charts.Line("best attack on this run: no attack is below", DRAWN, [risks.missed(a) for a in DRAWN]),
        charts.Line("guessing", (0.0, 1.0), (1.0, 0.0), charts.REFERENCE),
    ]
    measured = measured_mu(record)
    if measured is not None:
        curve = Tradeoff.gaussian(measured)
        lines.append(charts.Line("attacks of the audit: at least this good", DRAWN, [curve(a) for a in DRAWN], 2))
    at = words.FALSE_ALARMS
    return charts.figure(
        "tradeoff",
        "Trade-off curve",
        f"The rate of missed detections of the best attack falls from {risks.missed(0):.3g} without false alarms to 0. "
        f"At 1% false alarms it is at least {100 * risks.missed(at):.1f}%. The table below has the values.",
        lines,
        (charts.Axis("false alarms", 1.0), charts.Axis("missed detections", 1.0)),
        (
            ("false alarms", "missed, at least", "detected, at most"),
            [
                (f"{100 * a:g}%", f"{math.floor(1e4 * risks.missed(a)) / 100:g}%", wording.percent(risks.power(a)))
                for a in SHOWN
            ],
        ),
        note="The closer the curve is to the dashed line, the less an attack is better than guessing.",
    )


def measured_mu(record: RunRecord) -> float | None:
    """The largest mu that an attack of the audit has shown."""
    attacks = (record.audit or {}).get("attacks") or []
    found = [attack["measured"].get("mu") for attack in attacks]
    numbers = [mu for mu in found if isinstance(mu, (int, float)) and math.isfinite(mu)]
    return max(numbers, default=None)


def ledgers(record: RunRecord) -> Html:
    """The cost of each ledger, and how they compose."""
    rows = []
    for name, found in ((LEDGER, record.training), (EVALUATION, record.evaluation)):
        if found is not None:
            of = "training" if name == LEDGER else "held-out rows"
            size = "not recorded" if found.dataset_size is None else f"{found.dataset_size:,}"
            rows.append((of, size, f"{found.spent.steps:,}", words.figure(found.spent.epsilon)))
    head = ("releases from", f"{words.unit_of(record)}s", "releases", "epsilon")
    costs = table("Cost of each ledger", head, rows, numeric=True)
    return markup(costs, tag("p", words.composition(record)))


def protected(record: RunRecord) -> Html:
    """What the guarantee does not cover, and what it also covers."""
    return tag(
        "div",
        tag("div", tag("h3", "Not covered by the guarantee"), items(words.not_covered(record))),
        tag("div", tag("h3", "Also covered"), tag("p", words.POST_PROCESSING)),
        cls="pair",
    )


def mechanism(record: RunRecord, assumptions: list[str]) -> Html:
    """How the guarantee was obtained: the technical lines of the statement."""
    pairs = []
    if record.training is not None:
        pairs = [(name, inline(text)) for name, text in record.training.lines() if name in _TECHNICAL]
    return markup(facts(pairs), tag("h3", "Assumptions"), items(map(inline, assumptions)))


_TECHNICAL = (
    "setting",
    "weights",
    "neighbours",
    "releases",
    "sensitivity",
    "noise",
    "divisor",
    "accountant",
    "budget",
    "public data",
    "tuning",
)
