"""Results of the batch-clipping paper as Markdown."""

from __future__ import annotations

from clipwise.accounting.composition import SMALLEST_NOISE
from clipwise.privacy import rounded_up
from experiments.batch_clipping import appendix, conclusions, tuned
from experiments.batch_clipping.budgets import budgets
from experiments.batch_clipping.figures import FIGURES, Figure
from experiments.batch_clipping.rows import Rows, epochs, rows_of, seeds
from experiments.harness import report
from experiments.harness.store import Store
from experiments.harness.verdicts import SEEDS


def markdown(store: Store, quick: bool) -> str:
    """The whole page: commands, each figure, the table at equal epsilon, appendix B."""
    lines = ["# Batch clipping: results", ""]
    if quick:
        lines += [
            "**A quick run on small digits, to check that everything runs. The privacy of rows is equal in the "
            "paper's networks, which have other numbers of layers.**",
            "",
        ]
    lines += report.how(store)
    lines += [
        "Accuracy is on the test part, read once at the end of a run; mean and standard error where there are several "
        f"seeds. Epsilon is that of one run, at delta {appendix.DELTA:g}, for one record; by PLD, or an upper bound "
        "that is marked so. IC clips each example, BC the mean of a batch; rows with batch norm need BC.",
        "",
    ]
    shown = rows_of(store.cells.values(), quick)
    for figure in FIGURES:
        if any(name == figure.name for name, _, _ in shown):
            lines += [*_figure(figure, shown), ""]
    if any(name == tuned.NAME for name, _, _ in shown):
        lines += [*_equal(shown), ""]
    return "\n".join([*lines, *_conclusions(shown), *_budgets(), *_appendix()]) + "\n"


def _figure(figure: Figure, shown: Rows) -> list[str]:
    lines = [
        f"## {'Figure ' if figure.name[0].isdigit() else ''}{figure.name}. {figure.title}",
        "",
        "| run | paper | test accuracy | seed | epochs | epsilon | adjacency |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figure.rows:
        cells = shown.get((figure.name, row.label, None), [])
        if not cells:
            lines.append(f"| {row.label} | {row.paper} | not run | | | | |")
            continue
        entries = (
            row.label,
            row.paper,
            report.accuracy(cells),
            seeds(cells),
            epochs(cells, row.epochs_in_paper),
            report.epsilon(cells),
            next((c["adjacency"] for c in cells if "adjacency" in c), ""),
        )
        lines.append(f"| {' | '.join(entries)} |")
    return lines


def _equal(shown: Rows) -> list[str]:
    """Methods down, budgets across."""
    budgets = sorted({b for name, _, b in shown if name == tuned.NAME and b is not None})
    lines = [
        "## All strategies at equal epsilon",
        "",
        "BN-LeNet-5 with the norm that the row names, MNIST, Poisson batches, a record left out (zero-out). For each "
        "method and epsilon the best of the same trials by accuracy on a validation tenth; then trained again with "
        "that tenth, and tested once per seed. The choice of settings is not accounted for.",
        "",
        "| method | " + " | ".join(f"epsilon {b:g}" for b in budgets) + " |",
        "|---" * (1 + len(budgets)) + "|",
    ]
    known = {row for name, row, _ in shown if name == tuned.NAME}
    for method in (method for method in tuned.METHODS if method in known):  # not the withdrawn ones
        entries = []
        for budget in budgets:
            entries.append(report.accuracy(conclusions.finals(shown.get((tuned.NAME, method, budget), []))))
        lines.append(f"| {method} | " + " | ".join(entries) + " |")
    return lines


def _conclusions(shown: Rows) -> list[str]:
    found = conclusions.sentences(shown)
    if not found:
        return []
    return [
        "## Where the conclusions hold",
        "",
        f"Computed from the tables. A verdict needs at least {SEEDS} seeds, all epochs, and settings that were "
        "searched for each method; a difference shows if it is more than two standard errors. The rows of a figure "
        "have one learning rate, the paper's (and, for flat IC, m times that): they compare settings, not methods.",
        "",
        *found,
        "",
    ]


def _budgets() -> list[str]:
    """The settings of the paper with their true epsilons."""
    lines = [
        "## What the paper's settings guarantee",
        "",
        f"Epsilon by PLD at delta = {appendix.DELTA:g}, for batches of fixed size and a record replaced, of the noise "
        "that the paper prints: 2 C_h sigma on each of L parts, so the joint multiplier is sigma / sqrt(L). Beside it, "
        "if the whole gradient were one part with that sigma. Where the joint multiplier is below "
        f"{SMALLEST_NOISE:g} there is no PLD: such a line has an upper bound by how often a record takes part at most.",
        "",
        "| data | network | sigma | m | epochs | L | epsilon | one part | figures |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in budgets():
        s = line.setting
        network = s.model + (", no norm" if s.norm == "none" else "")
        entries = (s.data, network, f"{s.sigma:g}", f"{s.batch_size}", f"{line.epochs}", f"{line.parts}")
        epsilon = report.epsilon_text(line.epsilon, line.multiplier)
        proven = (epsilon, report.epsilon_text(line.flat_epsilon), ", ".join(line.figures))
        lines.append(f"| {' | '.join((*entries, *proven))} |")
    return [*lines, ""]


def _appendix() -> list[str]:
    lines = [
        "## Appendix B, recomputed",
        "",
        f"N = {appendix.RECORDS}, m = {appendix.BATCH}, {appendix.EPOCHS} epochs, L = {appendix.LAYERS} layers, "
        f"delta = {appendix.DELTA:g}. mu is that of the central limit theorem: an approximation, and no bound. Epsilon "
        "is exact accounting (PLD) of the same noise: for batches of fixed size and a record replaced; the same if the "
        "whole gradient were one part; and for Poisson batches with a record left out.",
        "",
        "| sigma | h, paper | h | mu, paper | mu | epsilon if mu were exact | epsilon | one part | Poisson |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in appendix.recomputed():
        stated = ["not stated" if value is None else f"{value:g}" for value in (line.stated.h, line.stated.mu)]
        proven = (line.epsilon, line.flat_epsilon, line.poisson_epsilon)
        lines.append(
            f"| {line.stated.sigma:g} | {stated[0]} | {line.h:.4g} | {stated[1]} | {line.mu:.4g} | "
            f"{line.clt_epsilon:.4g} | " + " | ".join(rounded_up(value) for value in proven) + " |"
        )
    return lines
