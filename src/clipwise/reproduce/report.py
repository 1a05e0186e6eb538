"""Results of `clipwise reproduce batch-clipping` as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from clipwise.privacy import rounded_up
from clipwise.reproduce import appendix, tuned
from clipwise.reproduce.figures import FIGURES, Figure
from clipwise.reproduce.store import Cell, Store

_NO_PRIVACY = 20.0  # beyond this an epsilon promises nothing that matters


def markdown(store: Store, quick: bool) -> str:
    """The whole page: how it was made, each figure, the page at equal epsilon, appendix B."""
    lines = ["# Batch clipping: results", ""]
    if quick:
        lines += ["**A quick run on small digits: it shows that everything works, and nothing else.**", ""]
    lines += [*(f"    {command}" for command in store.commands), "", *_where(store), ""]
    lines += [
        "Accuracy is on the test part, read once at the end of a run; mean and standard error where there are several "
        f"seeds. Epsilon is that of one run, by PLD, at delta {appendix.DELTA:g}, for one record. IC clips each "
        "example, BC the mean of a batch; rows with batch norm need BC.",
        "",
    ]
    shown = _by_place(store.cells.values(), quick)
    for figure in FIGURES:
        if any(name == figure.name for name, _, _ in shown):
            lines += [*_figure(figure, shown), ""]
    if any(name == tuned.NAME for name, _, _ in shown):
        lines += [*_equal(shown), ""]
    return "\n".join([*lines, *_appendix()]) + "\n"


def in_short(cell: Cell) -> str:
    """A run in a line."""
    if "failed" in cell:
        return str(cell["failed"])
    return f"{cell['accuracy']:.1%}, epsilon {_epsilon([cell])}, {cell['seconds']:.0f} s"


Place = tuple[str, str, float | None]  # figure, row, budget


def _by_place(cells: Iterable[Cell], quick: bool) -> dict[Place, list[Cell]]:
    """The runs of each row; a run may be in several figures. Of runs of several lengths only the longest count."""
    found: dict[Place, list[Cell]] = {}
    for cell in cells:
        for place in cell["shown"]:
            if place["quick"] == quick:
                key = (place["figure"], place["row"], place.get("budget"))
                found.setdefault(key, []).append(cell | {"epochs_asked": place["epochs_asked"]})
    longest = {key: max(cell["epochs"] for cell in runs) for key, runs in found.items()}
    return {key: [c for c in runs if c["epochs"] == longest[key]] for key, runs in found.items()}


def _figure(figure: Figure, shown: dict[Place, list[Cell]]) -> list[str]:
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
        full = row.epochs_in_paper or cells[0]["epochs_asked"]
        epochs = f"{cells[0]['epochs']}" + (f" of {full}" if cells[0]["epochs"] < full else "")
        adjacency = next((c["adjacency"] for c in cells if "adjacency" in c), "")
        entries = (
            row.label,
            row.paper,
            _accuracy(cells),
            str(len(cells)),
            epochs,
            _epsilon(cells),
            adjacency,
        )
        lines.append(f"| {' | '.join(entries)} |")
    return lines


def _equal(shown: dict[Place, list[Cell]]) -> list[str]:
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
            entries.append(_accuracy(_finals(shown.get((tuned.NAME, method, budget), []))))
        lines.append(f"| {method} | " + " | ".join(entries) + " |")
    return lines


def _finals(cells: list[Cell]) -> list[Cell]:
    """The tested runs of the setting that did best on the validation part; a failure where no trial came through."""
    trials = [c for c in cells if c["judged_by"] == "validation"]
    finished = [c for c in trials if "accuracy" in c]
    if not finished:
        return trials[:1]
    best = max(finished, key=lambda cell: float(cell["accuracy"]))["setting"]
    return [c for c in cells if c["judged_by"] == "test" and c["setting"] == best]


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


def _where(store: Store) -> list[str]:
    told = (f"{e.get('gpu', e['cpu'])}, torch {e['versions']['torch']}" for e in store.environments)
    return [f"On {'; '.join(dict.fromkeys(told))}."]


def _accuracy(cells: list[Cell]) -> str:
    """Mean and standard error in percent, or why there is none."""
    found = [100 * cell["accuracy"] for cell in cells if "accuracy" in cell]
    if not found:
        return str(cells[0]["failed"]) if cells else "not run"
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found) / math.sqrt(len(found)):.2f}"


def _epsilon(cells: list[Cell]) -> str:
    """The most that any of them spent."""
    found = [cell["epsilon"] for cell in cells if cell.get("epsilon") is not None]
    if not found:
        return next((cell["why_no_epsilon"] for cell in cells if "why_no_epsilon" in cell), "")
    most = max(found)
    return rounded_up(most) if most < _NO_PRIVACY else f"{most:.3g}: none in effect"
