"""Results of the weight-clipping paper as Markdown: our runs next to the printed numbers, and verdicts."""

from __future__ import annotations

from experiments.data.schemas import SCHEMAS
from experiments.harness.report import how
from experiments.harness.store import Store
from experiments.harness.verdicts import as_list
from experiments.lip_dp_sgd import verdicts
from experiments.lip_dp_sgd.claims import CLIPPED_TO_C, CLIPPED_TO_C_TITLE, METHODS, TABLES, contradictions
from experiments.lip_dp_sgd.grid import BIASED, EPSILONS, TIMED, TUNED_AT, image_rows, table_rows
from experiments.lip_dp_sgd.records import Results, in_words, largest_epsilon
from experiments.lip_dp_sgd.search import SEARCH, Row, effort_of
from experiments.lip_dp_sgd.sets import DIGITS
from experiments.lip_dp_sgd.trial import TITLES, Trial


def markdown(store: Store, quick: bool) -> str:
    """The whole page."""
    results = Results(store.cells, quick)
    lines = ["# Lip-DP-SGD: results", ""]
    if quick:
        lines += ["**A quick run on small digits, to check that everything runs.**", ""]
    lines += how(store)
    lines += [
        "Accuracy in percent on the test part, read once per seed: mean and standard error. Every method has the same "
        "network (where a row names one, that), the same epsilon (by PLD, Poisson batches, a record left out), the "
        "same number of trials on a validation part, and the same seeds. Weight clipping is run in its sound form: "
        "noise for all layers jointly, certified norms, a constant divisor. The choice of settings is not accounted "
        "for; the data is public. p is that of a Wilcoxon signed-rank test on pairs of seeds.",
        "",
    ]
    for figure, title in (("table-1", "Table 1: tables without group norm"), ("table-5", "Table 5: with and without")):
        if results.has(figure):
            lines += [f"## {title}", "", *_table(results, figure, quick), ""]
            lines += as_list(verdicts.verdicts(results, figure))
    if results.has("table-5"):
        lines += ["Where the paper's two tables do not agree:", "", *as_list(contradictions())]
    if results.has("1"):
        lines += ["## Figure 1: images", "", *_images(results, quick), ""]
        lines += as_list(verdicts.image_verdicts(results))
    if results.has("2"):
        lines += ["## Figure 2: seconds of an epoch", "", *_times(results, quick), ""]
        lines += as_list(verdicts.runtime_verdict(results))
    if results.has("3"):
        lines += ["## Figure 3: what clipping does to the mean gradient", "", *_bias(results, quick), ""]
        lines += as_list(verdicts.bias_verdict(results))
    if results.has("4"):
        lines += ["## Figure 4: averaged parameters", "", *_averaged(results, quick), ""]
        lines += as_list(verdicts.averaging_verdict(results))
    if any(results.has(figure) for figure in ("table-1", "table-5", "1")):
        lines += ["## Settings that were chosen", "", *_settings(results, quick), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(results: Results, figure: str, quick: bool) -> list[str]:
    methods = [TITLES[m] for m in METHODS]
    rows = {(row.data, row.norm): row for row in table_rows(figure, quick)}
    has_clipped = any(
        results.tested(figure, Row(name, norm, CLIPPED_TO_C, row.epsilon)) for (name, norm), row in rows.items()
    )
    head = ["data set", "norm", "epsilon", *(f"{m}, paper" for m in methods), *methods]
    head += [*([CLIPPED_TO_C_TITLE] if has_clipped else []), "Lip against DP-SGD"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (name, norm), row in rows.items():
        of = {m: Row(name, norm, m, row.epsilon) for m in METHODS}
        tested = {m: results.tested(figure, of[m]) for m in METHODS}
        printed = [f"{100 * TABLES[name].of(m, norm):.1f}" if name in TABLES else "" for m in METHODS]
        ours = [in_words(tested[m], results.trials(figure, of[m])) for m in METHODS]
        if has_clipped:
            ours.append(in_words(results.tested(figure, Row(name, norm, CLIPPED_TO_C, row.epsilon)), []))
        spent = largest_epsilon([cell for cells in tested.values() for cell in cells]) or f"{row.epsilon:g}"
        comparison = results.compared(figure, of["lip"], of["dp-sgd"])
        words = "" if comparison is None else f"{100 * comparison.difference:+.1f}, p = {comparison.p:.3g}"
        entries = [_title(name), norm, spent, *printed, *ours, words]
        lines.append(f"| {' | '.join(entries)} |")
    notes = [f"{_title(n)} is {SCHEMAS[n].note}." for n, _ in rows if n in SCHEMAS and SCHEMAS[n].note]
    notes += [f"{_title(n)} is {TABLES[n].other_task}." for n, _ in rows if n in TABLES and TABLES[n].other_task]
    if has_clipped:
        notes.append(
            f'The column "{CLIPPED_TO_C_TITLE}" is of another method than Fix-Lip-DP-SGD, by whose name it was run: '
            "weights were clipped to C, with noise for weights of norm C, where the paper rescales every layer to C."
        )
    return [*lines, "", *(line for note in dict.fromkeys(notes) for line in (note, ""))][:-1]


def _images(results: Results, quick: bool) -> list[str]:
    epsilons = EPSILONS[:1] if quick else EPSILONS
    lines = [
        f"Settings were chosen at epsilon {TUNED_AT:g} and used at the others. The paper prints no numbers here.",
        "",
        "| data set | norm | method | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |",
        "|---" * (3 + len(epsilons)) + "|",
    ]
    for row in image_rows(quick):
        entries = [in_words(results.tested("1", row, e), results.trials("1", row)) for e in epsilons]
        lines.append(f"| {row.data} | {row.norm} | {row.title} | {' | '.join(entries)} |")
    return lines


def _times(results: Results, quick: bool) -> list[str]:
    lines = [
        "Median step of each method in turn, times the steps of an epoch.",
        "",
        "| data set | batch | without privacy | DP-SGD | Lip-DP-SGD | Lip / DP-SGD |",
        "|---|---|---|---|---|---|",
    ]
    for name, sizes in ({DIGITS: (64, 256)} if quick else TIMED).items():
        for size in sizes:
            for cell in results.at("2", f"{name}/{size}"):
                seconds = cell.get("seconds_of_an_epoch")
                if seconds is None:
                    lines.append(f"| {name} | {size} | {cell.get('failed', 'unfinished')} | | | |")
                    continue
                words = " | ".join(f"{seconds[m]:.3g}" for m in ("plain", "dp-sgd", "lip"))
                lines.append(f"| {name} | {size} | {words} | {seconds['lip'] / seconds['dp-sgd']:.2f} |")
    return lines


def _bias(results: Results, quick: bool) -> list[str]:
    lines = [
        "Along the chosen run of DP-SGD, on 500 records: the norm of mean g - mean clip(g), the norm of mean clip(g), "
        "and the share of gradients that are clipped. Read off public records, without noise.",
        "",
        "| data set | step | error | clipped mean | share clipped |",
        "|---|---|---|---|---|",
    ]
    for name in (DIGITS,) if quick else BIASED:
        for cell in results.at("3", name):
            curve = cell.get("curve", [])
            for place in curve[:: max(1, len(curve) // 4)]:
                words = (f"{place['error']:.4f}", f"{place['clipped']:.4f}", f"{place['share_clipped']:.0%}")
                lines.append(f"| {name} | {place['step']} | {' | '.join(words)} |")
            if "failed" in cell:
                lines.append(f"| {name} | {cell['failed']} | | | |")
    return lines


def _averaged(results: Results, quick: bool) -> list[str]:
    lines = ["| method | epsilon | last parameters | averaged parameters |", "|---|---|---|---|"]
    for row in image_rows(quick):
        for epsilon in EPSILONS:
            cells = results.tested("4", row, epsilon)
            if cells:
                words = (in_words(cells, []), in_words(cells, [], "averaged_accuracy"))
                lines.append(f"| {TITLES[row.method]} | {epsilon:g} | {' | '.join(words)} |")
    return lines


def _settings(results: Results, quick: bool) -> list[str]:
    lines = [
        "The best trial of each row by its validation accuracy.",
        "",
        "| row | trials | C | rate | sampling | epochs | alpha |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [*table_rows("table-5", quick), *image_rows(quick)]
    for row in rows:
        chosen = SEARCH.best(row, quick, results.cells)
        if chosen is not None:
            effort = effort_of(row, quick)
            lines.append(f"| {row.label} | {effort.spread + effort.near} | {_setting(chosen)} |")
    return lines


def _setting(trial: Trial) -> str:
    rate = trial.sample_rate or 0.0
    alpha = f"{trial.alpha:.2g}" if trial.norm == "bounded" else ""
    words = (f"{trial.max_norm:.3g}", f"{trial.learning_rate:.2g}", f"1/{1 / rate:.0f}", str(trial.epochs), alpha)
    return " | ".join(words)


def _title(name: str) -> str:
    return SCHEMAS[name].title if name in SCHEMAS else name
