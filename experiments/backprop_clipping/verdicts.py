"""Verdicts on the paper's conclusions, as sentences computed from sound runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from experiments.backprop_clipping.claims import CLAIMS
from experiments.backprop_clipping.grid import EPSILONS, SIGNALS, private_methods, sets, signal_rows
from experiments.backprop_clipping.records import Results
from experiments.backprop_clipping.search import Row, effort_of, space
from experiments.backprop_clipping.trial import BACKPROP, DP_SGD, METHODS
from experiments.backprop_clipping.withdrawn import epsilon_of_last_layer
from experiments.harness import report
from experiments.harness.results import Measured
from experiments.harness.store import Cell
from experiments.harness.verdicts import NOT_TESTED, in_brackets, lacking, survival

CLOSE = 1.0  # points that count as "approaches"
USABLE = 10.0  # points below training without noise that still count as usable


def best_pair(results: Results, data: str, epsilon: float) -> tuple[Row | None, Row | None]:
    """The best of backpropagation clipping and the best of DP-SGD at one epsilon, by validation."""
    methods = private_methods(data)
    ours, theirs = (
        results.best_of([Row(data, m, epsilon) for m in methods if m in family]) for family in (BACKPROP, DP_SGD)
    )
    return ours, theirs


def headline(results: Results) -> list[str]:
    """The numbers of table 1 for the paper's own method."""
    found, places = [], 0
    reached, compared = 0, list[Row]()
    for data, claim in CLAIMS.items():
        ours, _ = best_pair(results, data, claim.epsilon)
        mean = None if ours is None else results.mean(ours)
        if ours is None or mean is None:
            continue
        places += 1
        compared.append(ours)
        error = report.standard_error(report.accuracies(results.tested(ours)))
        reached += mean + 2 * error >= 100 * claim.ours
        found.append(
            f"{data} {results.accuracy(ours)}% where {100 * claim.ours:.1f}% is printed, at epsilon {claim.epsilon:g}"
        )
    if not places:
        return []
    return [
        f'"Table 1, backpropagation clipping": **{_verdict(results, compared, reached, places)}.** The best sound '
        "form, of the settings that were tried, has "
        f"{'; '.join(found)}."
    ]


def against_dp_sgd(results: Results) -> list[str]:
    """Whether backpropagation clipping is more accurate at the same epsilon."""
    better: list[str] = []
    worse: list[str] = []
    open_: list[str] = []
    compared: list[Row] = []
    for data in sets(results.quick):
        for epsilon in EPSILONS[data]:
            ours, theirs = best_pair(results, data, epsilon)
            if ours is None or theirs is None:
                continue
            difference = results.difference(ours, theirs)
            assert difference is not None
            compared += [ours, theirs]
            places = {1: better, -1: worse, 0: open_}[difference.verdict]
            places.append(f"{data} at {epsilon:g}: {difference.signed(1)}")
    count = len(better) + len(worse) + len(open_)
    if not count:
        return []
    return [
        '"Higher accuracy than DP-SGD at the same or a lower epsilon": '
        f"**{_verdict(results, compared, len(better), count)}.** With the settings that were chosen, at equal epsilon, "
        f"backpropagation clipping is above DP-SGD in {len(better)} of {count} places{in_brackets(better)}, below "
        f"it in {len(worse)}{in_brackets(worse)}, and within two standard errors in "
        f"{len(open_)}{in_brackets(open_)}. Points of accuracy."
    ]


def near_no_noise(results: Results) -> list[str]:
    """Figure 5: accuracy against that of the same clips without noise."""
    found = []
    for limit, allowed, claim in (
        (0.1, USABLE, "A usable model with epsilon of at most 0.1"),
        (1.0, CLOSE, "With epsilon of at most 1 accuracy is near that without noise"),
    ):
        words, kept = [], 0
        compared: list[Row] = []
        for data in sets(results.quick):
            without = results.mean(Row(data, "clipped", None))
            epsilons = [e for e in EPSILONS[data] if e <= limit]
            ours = best_pair(results, data, epsilons[-1])[0] if epsilons else None
            mean = None if ours is None else results.mean(ours)
            if ours is not None and mean is not None and without is not None:
                kept += without - mean <= allowed
                compared.append(ours)
                words.append(f"{data} {results.accuracy(ours)}% at {epsilons[-1]:g}, {without:.1f}% without noise")
        if words:
            found.append(
                f'"{claim}" (within {allowed:g} points): **{_verdict(results, compared, kept, len(words))}.** '
                f"{'; '.join(words)}."
            )
    return found


def price_of_clips(results: Results) -> list[str]:
    """The cost of the paper's clips without noise."""
    words, kept = [], 0
    compared: list[Row] = []
    for data, claim in CLAIMS.items():
        rows = Row(data, "clipped-upstream", None), Row(data, "plain", None)
        difference = results.difference(*rows)
        if difference is not None:
            compared += rows
            printed = 100 * (claim.clipped - claim.plain)
            kept += difference.mean >= printed - 1
            words.append(f"{data} {difference.signed(1)} points ({printed:+.1f} in the paper)")
    if not words:
        return []
    word = _verdict(results, compared, kept, len(words))
    return [f'"Clips cost little without noise": **{word}.** {"; ".join(words)}.']


def our_changes(results: Results) -> list[str]:
    """The effect of the smaller bound and of normalization, over all places."""
    pairs = {
        "The smaller bound, in mode clip": ("gradient-clip", "upstream-clip"),
        "The smaller bound, in mode normalize": ("gradient-normalize", "upstream-normalize"),
        "To normalize in place of to clip, with the smaller bound": ("gradient-normalize", "gradient-clip"),
        "Tanh in place of ReLU, with the smaller bound, in mode clip": ("gradient-clip-tanh", "gradient-clip"),
    }
    found = []
    for title, (first, second) in pairs.items():
        gains = [
            gain
            for data in sets(results.quick)
            for e in EPSILONS[data]
            if (gain := results.difference(Row(data, first, e), Row(data, second, e))) is not None
        ]
        if gains:
            tried = [Row(data, m, e) for data in sets(results.quick) for e in EPSILONS[data] for m in (first, second)]
            missing = _lacking(results, [row for row in tried if results.tested(row)])
            found.append(f"{title}: {_tally(gains)}." + (f" {NOT_TESTED}: {missing}." if missing else ""))
    return found


def withdrawn_setting(results: Results) -> list[str]:
    """The guarantee of the published noise, and the result with enough noise."""
    found = []
    for data, claim in CLAIMS.items():
        bad = results.at("withdrawn", f"{data}/as published")
        good = results.at("withdrawn", f"{data}/honest")
        spent = [c["epsilon"] for c in bad if c.get("epsilon") is not None]
        if not spent:
            continue
        last_layer = report.epsilon_text(epsilon_of_last_layer(claim))
        found.append(
            f"{data}, claimed epsilon {claim.epsilon:g}: the noise that ran gives {report.accuracy(bad)}% (printed "
            f"{100 * claim.ours:.1f}%), and its clips guarantee an epsilon of {max(spent):.3g}. The last layer "
            f"alone, which an image moves by up to sqrt(2) C1, costs {last_layer}. With "
            f"that noise on gradients that are clipped to C1 C2 = {claim.input_norm * claim.grad_norm:g}, epsilon is "
            f"{report.epsilon(good)} and accuracy {report.accuracy(good)}% (chance is 10%)."
        )
    return found


def signal_to_noise(results: Results) -> list[str]:
    """The paper's argument: backpropagation clipping leaves more signal over the noise, and gradients grow less."""
    curves = {m: curve for m in SIGNALS if (curve := _curve(results, m))}
    if not curves:
        return []
    papers, ours = SIGNALS[0], [m for m in SIGNALS if m in curves and m in BACKPROP]
    theirs = [m for m in SIGNALS if m in curves and m not in BACKPROP]
    ratio = {m: ratios(curve) for m, curve in curves.items()}
    growth = {m: _growth(curve) for m, curve in curves.items()}
    found = []
    for other in theirs:
        word = "Not run"
        if papers in curves:  # one run of each method
            more = [name for name in ratio[papers] if ratio[papers][name] > ratio[other][name]]
            word = f"{NOT_TESTED} (one run): more in {len(more)} of {len(ratio[papers])} layers"
        words = "; ".join(
            f"{METHODS[m].title}: "
            + ", ".join(f"{name} {mine:.3g} against {ratio[other][name]:.3g}" for name, mine in ratio[m].items())
            for m in ours
        )
        found.append(
            f'"More signal over the noise than {METHODS[other].title}", by the paper\'s form: **{word}.** Signal over '
            f"noise per layer (its place in the network), geometric mean along the run. {words}."
        )
    word = "Not run"
    if papers in curves and theirs:
        less = growth[papers] < min(growth[m] for m in theirs)
        word = f"{NOT_TESTED} (one run): {'less' if less else 'not less'} than with DP-SGD"
    words = ", ".join(f"{METHODS[m].title} {value:.2f} times" for m, value in growth.items())
    found.append(
        f'"Gradients grow less", by the paper\'s form: **{word}.** From the first point to the last the mean '
        f"gradient, nothing clipped, gets as long as {words}."
    )
    return found


def ratios(curve: list[Cell]) -> dict[str, float]:
    """Signal over noise of each layer: the geometric mean over the points."""
    names = list(curve[0]["layers"])
    return {
        name: math.exp(
            statistics.fmean(
                math.log(max(p["layers"][name]["signal"], 1e-12) / p["layers"][name]["noise"]) for p in curve
            )
        )
        for name in names
    }


def _growth(curve: list[Cell]) -> float:
    first, last = (math.hypot(*(layer["gradient"] for layer in curve[place]["layers"].values())) for place in (0, -1))
    return last / first


def _curve(results: Results, method: str) -> list[Cell]:
    epsilon = signal_rows(results.quick)[method].epsilon
    for cell in results.at("signal", method, epsilon):
        if cell.get("curve"):
            return list(cell["curve"])
    return []


def _tally(gains: list[Measured]) -> str:
    better, worse = (sum(gain.verdict == sign for gain in gains) for sign in (1, -1))
    mean = statistics.fmean(gain.mean for gain in gains)
    return f"{mean:+.1f} points on average over {len(gains)} places; better in {better}, worse in {worse}"


def _verdict(results: Results, rows: Iterable[Row], kept: int, count: int) -> str:
    """The verdict on a claim, if the settings of these rows were searched well enough."""
    missing = _lacking(results, rows)
    return f"{NOT_TESTED} ({missing})" if missing else survival(kept, count)


def _lacking(results: Results, rows: Iterable[Row]) -> str:
    """The evidence that is missing for a verdict on these rows."""
    found = [
        lacking(len(results.tested(row)), effort.spread + effort.near, len(space(row)))
        for row in rows
        for effort in (effort_of(row, results.quick),)
    ]
    return "; ".join(dict.fromkeys(one for one in found if one))
