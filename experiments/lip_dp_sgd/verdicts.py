"""Verdicts on the paper's conclusions, as sentences computed from runs at equal epsilon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.data.schemas import SCHEMAS
from experiments.harness.verdicts import NOT_TESTED, SEEDS, in_brackets, survival
from experiments.lip_dp_sgd.claims import METHODS, NORM_TITLES, TABLES
from experiments.lip_dp_sgd.grid import AVERAGED_DATA, BIASED, EPSILONS, TIMED, TUNED_AT, image_rows
from experiments.lip_dp_sgd.records import Results, mean_of
from experiments.lip_dp_sgd.search import Row
from experiments.lip_dp_sgd.sets import IMAGES
from experiments.lip_dp_sgd.trial import TITLES


@dataclass(frozen=True)
class Tally:
    """The data sets on which one method is clearly better or worse than another, undecided, and not run."""

    better: tuple[str, ...]
    worse: tuple[str, ...]
    undecided: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of compared data sets."""
        return len(self.better) + len(self.worse) + len(self.undecided)

    def sentence(self, first: str, second: str) -> str:
        """The tally in words."""
        parts = [
            f"{first} is better than {second} on {len(self.better)} of {self.count}{in_brackets(self.better)}",
            f"worse on {len(self.worse)}{in_brackets(self.worse)}",
            f"and not clearly different (p of at least 0.05) on {len(self.undecided)}{in_brackets(self.undecided)}",
        ]
        return ", ".join(parts) + "."

    @property
    def word(self) -> str:
        """The verdict on the claim that the first is better everywhere."""
        return survival(len(self.better), self.count) if self.count else "Not run"


def verdicts(results: Results, figure: str) -> list[str]:
    """A sentence for each conclusion about tables that has results."""
    found: list[str] = []
    norms = ("none",) if figure == "table-1" else ("none", "bounded")
    for norm in norms:
        tally = tally_of(results, figure, _pairs(norm, "lip", norm, "dp-sgd"))
        if tally.count:
            words = tally.sentence(TITLES["lip"], TITLES["dp-sgd"])
            found.append(f'"Lip-DP-SGD outperforms DP-SGD", {NORM_TITLES[norm]}: **{tally.word}.** {words}')
    for second in ("lip", "dp-sgd") if results.has(figure) else ():
        tally = tally_of(results, figure, _pairs("none", second, "none", "fix-lip"))
        left = len(TABLES) - tally.count
        word = f"{NOT_TESTED} on {left} of {len(TABLES)} tables" if left else tally.word
        words = f" {tally.sentence(TITLES[second], TITLES['fix-lip'])}" if tally.count else ""
        found.append(f'"Fixed norms are worse than {TITLES[second]}": **{word}.**{words}')
    if figure == "table-5":
        for method in METHODS:
            tally = tally_of(results, figure, _pairs("bounded", method, "none", method))
            if tally.count:
                word = "Does not survive" if len(tally.better) > tally.count / 2 else "Survives"
                words = tally.sentence(f"{TITLES[method]} with group norm", "without it")
                found.append(f'"Group norm does not help on tables", {TITLES[method]}: **{word}.** {words}')
    found += _against_print(results, figure)
    return found


def image_verdicts(results: Results) -> list[str]:
    """Verdicts on figure 1."""
    found = []
    for norm in ("none", "bounded"):
        better: list[str] = []
        worse: list[str] = []
        for name in IMAGES:
            for epsilon in EPSILONS:
                lip, dp = (
                    mean_of(results.tested("1", Row(name, norm, m, TUNED_AT), epsilon)) for m in ("lip", "dp-sgd")
                )
                if lip is not None and dp is not None:
                    (better if lip >= dp else worse).append(f"{name} at {epsilon:g}")
        if better or worse:
            word = survival(len(better), len(better) + len(worse))
            found.append(
                f'"Lip-DP-SGD is as good as DP-SGD or better on images", {NORM_TITLES[norm]}: **{word}.** The mean '
                f"of Lip-DP-SGD is at least that of DP-SGD in {len(better)} of {len(better) + len(worse)} "
                f"places{in_brackets(better)}. Seeds are few: this is no test."
            )
    for method in ("dp-sgd", "lip"):
        gains = []
        for name in IMAGES:
            for epsilon in EPSILONS:
                with_norm, without = (
                    mean_of(results.tested("1", Row(name, n, method, TUNED_AT), epsilon)) for n in ("bounded", "none")
                )
                if with_norm is not None and without is not None:
                    gains.append(with_norm - without)
        if gains:
            helped = sum(gain > 0 for gain in gains)
            word = survival(helped, len(gains))
            found.append(
                f'"Group norm helps on images", {TITLES[method]}: **{word}.** In {helped} of {len(gains)} places; by '
                f"{100 * sum(gains) / len(gains):+.1f} points on average."
            )
    return found


def averaging_verdict(results: Results) -> list[str]:
    """The verdict on figure 4."""
    gains: dict[str, list[float]] = {}
    for row in image_rows(False):
        if row.data == AVERAGED_DATA and row.norm == "none":
            for epsilon in EPSILONS:
                for cell in results.tested("4", row, epsilon):
                    if "averaged_accuracy" in cell:
                        gains.setdefault(row.method, []).append(cell["averaged_accuracy"] - cell["accuracy"])
    if len(gains) < 2:
        return []
    means = {method: 100 * sum(values) / len(values) for method, values in gains.items()}
    alike = abs(means["lip"] - means["dp-sgd"]) < 1
    words = ", ".join(f"{TITLES[m]} {gain:+.1f} points" for m, gain in means.items())
    return [
        f'"Averaged parameters have a similar effect on both methods": **{"Survives" if alike else "Does not survive"}'
        f".** {words} ({len(gains['lip'])} runs each; similar means within one point)."
    ]


def runtime_verdict(results: Results) -> list[str]:
    """The verdict on figure 2."""
    slower: list[str] = []
    ratios: list[float] = []
    for name, sizes in TIMED.items():
        for size in sizes:
            for cell in results.at("2", f"{name}/{size}"):
                seconds = cell.get("seconds_of_an_epoch")
                if seconds:
                    ratios.append(seconds["lip"] / seconds["dp-sgd"])
                    if ratios[-1] > 1:
                        slower.append(f"{name} at {size}")
    if not ratios:
        return []
    word = survival(len(slower), len(ratios))
    return [
        f'"Lip-DP-SGD is slightly slower than DP-SGD": **{word}.** It is slower in {len(slower)} of {len(ratios)} '
        f"places{in_brackets(slower)}; its epoch takes {min(ratios):.2f} to {max(ratios):.2f} times as long."
    ]


def bias_verdict(results: Results) -> list[str]:
    """The verdict on figure 3."""
    words, grown = [], 0
    seeds: list[int] = []
    for name in BIASED:
        curves = [cell["curve"] for cell in results.at("3", name) if cell.get("curve")]
        for curve in curves:
            first, last = curve[0]["error"], curve[-1]["error"]
            grown += last > first
            words.append(f"{SCHEMAS[name].title} {first:.3g} to {last:.3g}")
        if curves:
            seeds.append(len(curves))
    if not words:
        return []
    word = survival(grown, len(words))
    if min(seeds) < SEEDS:
        word = f"{NOT_TESTED} (fewer than {SEEDS} seeds)"
    return [
        f'"The error that clipping makes grows along a run of DP-SGD": **{word}.** From the first step to the last: '
        f"{'; '.join(words)}."
    ]


def tally_of(results: Results, figure: str, pairs: Iterable[tuple[str, Row, Row]]) -> Tally:
    """Compare two rows on each data set."""
    places: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for name, first, second in pairs:
        comparison = results.compared(figure, first, second)
        if comparison is not None:
            places[comparison.verdict].append(SCHEMAS[name].title)
    return Tally(tuple(places[1]), tuple(places[-1]), tuple(places[0]))


def _pairs(norm: str, method: str, other_norm: str, other: str) -> list[tuple[str, Row, Row]]:
    return [
        (name, Row(name, norm, method, claim.epsilon), Row(name, other_norm, other, claim.epsilon))
        for name, claim in TABLES.items()
    ]


def _against_print(results: Results, figure: str) -> list[str]:
    """Where DP-SGD, tuned like the others, is above the paper's number for its own method."""
    passed, compared = [], 0
    for name, claim in TABLES.items():
        ours = mean_of(results.tested(figure, Row(name, "none", "dp-sgd", claim.epsilon)))
        if ours is not None and not claim.other_task:
            compared += 1
            if ours > claim.of("lip", "none"):
                passed.append(SCHEMAS[name].title)
    if not compared:
        return []
    return [
        f"DP-SGD, tuned with the same trials, is above the number that the paper prints for Lip-DP-SGD on "
        f"{len(passed)} of {compared}{in_brackets(passed)}. Splits and encodings are not the paper's, so this is no "
        "test."
    ]
