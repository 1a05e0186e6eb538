"""Results of the batch-clipping paper as Markdown."""

from __future__ import annotations

from clipwise.privacy import rounded_up
from clipwise.reproduce import report
from clipwise.reproduce.batch_clipping import appendix, tuned
from clipwise.reproduce.batch_clipping.figures import FIGURES, Figure
from clipwise.reproduce.report import Shown
from clipwise.reproduce.store import Cell, Store


def markdown(store: Store, quick: bool) -> str:
    """The whole page: how it was made, each figure, the page at equal epsilon, appendix B."""
    lines = ["# Batch clipping: results", ""]
    if quick:
        lines += ["**A quick run on small digits: it shows that everything works, and nothing else.**", ""]
    lines += report.how(store)
    lines += [
        "Accuracy is on the test part, read once at the end of a run; mean and standard error where there are several "
        f"seeds. Epsilon is that of one run, by PLD, at delta {appendix.DELTA:g}, for one record. IC clips each "
        "example, BC the mean of a batch; rows with batch norm need BC.",
        "",
    ]
    shown = report.by_place(store.cells.values(), quick)
    for figure in FIGURES:
        if any(name == figure.name for name, _, _ in shown):
            lines += [*_figure(figure, shown), ""]
    if any(name == tuned.NAME for name, _, _ in shown):
        lines += [*_equal(shown), ""]
    return "\n".join([*lines, *_appendix()]) + "\n"


def _figure(figure: Figure, shown: Shown) -> list[str]:
    lines = [
        f"## {'Figure ' if figure.name[0].isdigit() else ''}{figure.name}. {figure.title}",
        "",
        "| run | paper | test accuracy | seeds | epochs | epsilon | adjacency |",
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
            report.seeds(cells),
            report.epochs(cells, row.epochs_in_paper),
            report.epsilon(cells),
            next((c["adjacency"] for c in cells if "adjacency" in c), ""),
        )
        lines.append(f"| {' | '.join(entries)} |")
    return lines


def _equal(shown: Shown) -> list[str]:
    """Methods down, budgets across."""
    budgets = sorted({b for name, _, b in shown if name == tuned.NAME and b is not None})
    lines = [
        "## All strategies at equal epsilon",
        "",
        "BN-LeNet-5 in the norm that the row says, MNIST, Poisson batches, a record left out (zero-out). For each "
        "method and epsilon the best of the same trials by accuracy on a validation tenth; then trained anew with that "
        "tenth, and tested once a seed. The choice of settings is not accounted for.",
        "",
        "| method | " + " | ".join(f"epsilon {b:g}" for b in budgets) + " |",
        "|---" * (1 + len(budgets)) + "|",
    ]
    for method in dict.fromkeys(row for name, row, _ in shown if name == tuned.NAME):
        entries = []
        for budget in budgets:
            entries.append(report.accuracy(finals(shown.get((tuned.NAME, method, budget), []))))
        lines.append(f"| {method} | " + " | ".join(entries) + " |")
    return lines


def finals(cells: list[Cell]) -> list[Cell]:
    """The tested runs of the setting that did best on the validation part; a failure where no trial came through."""
    trials = [c for c in cells if c["judged_by"] == "validation"]
    best = tuned.chosen(trials)
    return (
        trials[:1]
        if best is None
        else [c for c in cells if c["judged_by"] == "test" and c["setting"] == best]
    )


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
        stated = [
            "not stated" if value is None else f"{value:g}" for value in (line.stated.h, line.stated.mu)
        ]
        proven = (line.epsilon, line.flat_epsilon, line.poisson_epsilon)
        lines.append(
            f"| {line.stated.sigma:g} | {stated[0]} | {line.h:.4g} | {stated[1]} | {line.mu:.4g} | "
            f"{line.clt_epsilon:.4g} | " + " | ".join(rounded_up(value) for value in proven) + " |"
        )
    return lines
