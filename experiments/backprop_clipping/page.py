"""Results of the paper on backpropagation clipping as Markdown: our runs next to the printed numbers, and verdicts."""

from __future__ import annotations

from experiments.backprop_clipping import verdicts
from experiments.backprop_clipping.claims import CLAIMS
from experiments.backprop_clipping.grid import EPSILONS, SIGNALS, epsilons, private_methods, rows, sets, signal_rows
from experiments.backprop_clipping.records import Results
from experiments.backprop_clipping.search import Row, effort_of
from experiments.backprop_clipping.trial import METHODS, OPEN, Trial
from experiments.backprop_clipping.withdrawn import KINDS, Withdrawn
from experiments.harness import report
from experiments.harness.store import Store
from experiments.harness.verdicts import as_list


def markdown(store: Store, quick: bool) -> str:
    """The whole page."""
    results = Results(store.cells, quick)
    lines = ["# Backpropagation clipping: results", ""]
    if quick:
        lines += ["**A quick run on small digits, to check that everything runs.**", ""]
    lines += report.how(store)
    lines += [
        "Accuracy in percent on the test part, which chooses nothing: mean and standard error over seeds. All methods "
        "have the paper's network, the same epsilon (PLD, Poisson batches, a record left out, delta 1e-5), and the "
        "same number of trials on a validation part for each epsilon. The choice of settings is not accounted for; "
        "the data is public.",
        "",
    ]
    if results.has("table-1"):
        lines += ["## Table 1", "", *_table(results), ""]
        lines += as_list(
            [
                *verdicts.headline(results),
                *verdicts.price_of_clips(results),
                *([] if results.has("5") else verdicts.against_dp_sgd(results)),
            ]
        )
    if results.has("withdrawn"):
        lines += ["## The withdrawn setting", "", *_withdrawn(results), ""]
        lines += as_list(verdicts.withdrawn_setting(results))
    if results.has("5"):
        lines += ["## Figure 5: accuracy against epsilon", "", *_curves(results), ""]
        lines += as_list(verdicts.near_no_noise(results))
        lines += ["## The best for each epsilon", "", *_best(results), ""]
        lines += as_list([*verdicts.against_dp_sgd(results), *verdicts.our_changes(results)])
    if results.has("signal"):
        lines += ["## Signal and noise per layer", "", *_signal(results), ""]
        lines += as_list(verdicts.signal_to_noise(results))
    if results.has("table-1") or results.has("5"):
        lines += ["## Settings that were chosen", "", *_settings(results), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(results: Results) -> list[str]:
    lines = ["| data set | method | epsilon | paper | here |", "|---|---|---|---|---|"]
    for data in sets(results.quick):
        for method in OPEN:
            row = Row(data, method, None)
            lines.append(_entry(results, row, _printed(row)))
        for epsilon in epsilons("table-1", data):
            lines += [
                _entry(results, row, _printed(row)) for row in (Row(data, m, epsilon) for m in private_methods(data))
            ]
    return lines


def _printed(row: Row) -> str:
    """The paper's accuracy of this row at this epsilon."""
    claim = CLAIMS.get(row.data)
    value = None if claim is None else claim.printed(row.method)
    if claim is None or value is None:
        return ""
    at = {"upstream-clip": claim.epsilon, "dp-sgd-relu": claim.baseline_epsilon}
    at["dp-sgd-tanh"] = claim.baseline_epsilon
    if row.epsilon != at.get(row.method):
        return ""
    return f"{100 * value:.1f}" + (", withdrawn" if row.method == "upstream-clip" else "")


def _entry(results: Results, row: Row, printed: str) -> str:
    epsilon = "none" if row.epsilon is None else f"{row.epsilon:g}"
    cells = (row.data, METHODS[row.method].title, epsilon, printed, results.accuracy(row))
    return f"| {' | '.join(cells)} |"


def _withdrawn(results: Results) -> list[str]:
    lines = [
        "The paper's best setting and noise. As published, clips act on gradients of the mean loss, and the noise is "
        "divided by the batch size on top of that. Honest noise: the same noise on gradients that are clipped to C1 "
        "C2. Epsilon is what the clips and the noise that ran guarantee, by the paper's own scheme: disjoint batches, "
        "one record replaced.",
        "",
        "| data set | noise | epsilon, claimed | epsilon | accuracy, printed | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for data in sets(results.quick):
        for kind in KINDS:
            cells = results.at("withdrawn", f"{data}/{kind}")
            if cells:
                claim = Withdrawn(data, kind).claim
                printed = f"{100 * claim.ours:.1f}" if claim.ours and kind == "as published" else ""
                words = (data, kind, f"{claim.epsilon:g}", report.epsilon(cells), printed)
                lines.append(f"| {' | '.join(words)} | {report.accuracy(cells)} |")
    return lines


def _curves(results: Results) -> list[str]:
    lines = []
    for data in sets(results.quick):
        values = EPSILONS[data]
        head = "".join(f" epsilon {e:g} |" for e in values)
        lines += [f"| {data} |{head} without noise |", "|---" * (2 + len(values)) + "|"]
        for method in private_methods(data):
            entries = [results.accuracy(Row(data, method, e)) for e in values]
            lines.append(f"| {METHODS[method].title} | {' | '.join(entries)} | |")
        for method in OPEN:
            words = results.accuracy(Row(data, method, None))
            lines.append(f"| {METHODS[method].title} |{' |' * len(values)} {words} |")
        lines.append("")
    return lines[:-1]


def _best(results: Results) -> list[str]:
    lines = [
        "The best of backpropagation clipping beside the best of DP-SGD, on the same network (but for its "
        "activation and norm). Which is best was decided on the validation part.",
        "",
        "| data set | epsilon | backpropagation clipping | accuracy | DP-SGD | accuracy | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in sets(results.quick):
        for epsilon in EPSILONS[data]:
            ours, theirs = verdicts.best_pair(results, data, epsilon)
            if ours is not None and theirs is not None:
                words = [
                    entry for row in (ours, theirs) for entry in (METHODS[row.method].title, results.accuracy(row))
                ]
                difference = results.difference(ours, theirs)
                assert difference is not None  # both rows have tested runs
                lines.append(f"| {data} | {epsilon:g} | {' | '.join(words)} | {difference.signed(1)} |")
    return lines


def _signal(results: Results) -> list[str]:
    lines = [
        "Along a run of each method with its chosen setting (per layer: that of flat clipping), on 1,000 training "
        "images, read off without noise. Gradient: the length of the mean, nothing clipped. Passed back: "
        "the mean length of an example's gradient at the layer's output, with the clips of the layers behind it. "
        "Signal: the length of the clipped mean. Noise: the expected length of the noise on it. Layers are named by "
        "their place in the network.",
        "",
        "| method | step | layer | gradient | passed back | signal | noise | signal / noise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in SIGNALS:
        epsilon = signal_rows(results.quick)[method].epsilon
        cells = results.at("signal", method, epsilon)
        if not any(cell.get("curve") for cell in cells):
            lines.append(f"| {METHODS[method].title} | not run |" + " |" * 6)
        for cell in cells:
            curve = cell.get("curve", [])
            for place in dict.fromkeys((0, len(curve) // 2, len(curve) - 1)) if curve else ():
                for name, layer in curve[place]["layers"].items():
                    words = [
                        f"{layer[what]:.3g}" if what in layer else ""
                        for what in ("gradient", "passed", "signal", "noise")
                    ]
                    words.append(f"{layer['signal'] / layer['noise']:.3g}")
                    step = curve[place]["step"]
                    lines.append(f"| {METHODS[method].title} | {step} | {name} | {' | '.join(words)} |")
    return lines


def _settings(results: Results) -> list[str]:
    lines = [
        "The best trial of each row by its validation accuracy. The rate of SGD is over what one example can move.",
        "",
        "| row | epsilon | trials | optimizer | rate | sampling | epochs | C | C1 | C2 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for data in sets(results.quick) for row in rows("5", data)):
        chosen = results.chosen(row)
        if chosen is not None:
            effort = effort_of(row, results.quick)
            epsilon = "none" if row.epsilon is None else f"{row.epsilon:g}"
            lines.append(f"| {row.label} | {epsilon} | {effort.spread + effort.near} | {_setting(chosen)} |")
    return lines


def _setting(trial: Trial) -> str:
    clips, way = trial.way.clips, trial.way
    words = (
        trial.optimizer,
        f"{trial.learning_rate:.2g}",
        f"1/{1 / trial.sample_rate:.0f}",
        str(trial.epochs),
        f"{trial.max_norm:.2g}" if clips == "examples" else "",
        f"{trial.input_norm:.2g}" if clips == "layers" else "",
        f"{trial.grad_norm:.2g}" if clips == "layers" and way.mode == "clip" else "",
    )
    return " | ".join(words)
