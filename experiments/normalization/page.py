"""Results of the normalization paper as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from clipwise.privacy import rounded_up
from experiments.harness import report
from experiments.harness.results import CLEAR, measured
from experiments.harness.store import Cell, Store
from experiments.normalization import speed
from experiments.normalization.findings import findings
from experiments.normalization.records import Results, results, tables_of
from experiments.normalization.tables import FIGURE_1, Table
from experiments.normalization.training import DELTA, MAX_NORM, MICROBATCH, MOMENTUM

_OURS = {"noise": "Without privacy: Adam, weights drawn anew at each pass, in evaluation too."}
_OURS["epsilon"] = (
    f"Flat per-example clipping at {MAX_NORM:g}, Poisson batches, SGD with momentum {MOMENTUM:g}, delta {DELTA:g}, a "
    "record left out (zero-out), epsilon by PLD for one run. † marks claims whose epsilon is not true: the published "
    "scheme lets one record move all gradients of its batch."
)
_BY_MICROBATCH = (
    f" BC clips the mean gradient of microbatches of about {MICROBATCH} records, to the same bound, and normalizes by "
    "the microbatch; for evaluation, by the public rows, or by noised statistics of the run. Its rates are such that "
    "an update's noise is about as large."
)
_RELEASED = " Noised statistics take a tenth of the privacy of each step."


def markdown(store: Store, is_quick: bool) -> str:
    """The whole page."""
    lines = ["# Normalization layers: results", ""]
    if is_quick:
        lines += ["**A quick run on small data, to check that everything runs.**", ""]
    lines += report.how(store)
    lines += [
        "Accuracy in percent on the test part, read once at the end of a run: mean and standard error over seeds. "
        "Where several settings were tried, every method had the same trials and the best on a validation tenth was "
        "taken; that choice is not accounted for. A difference is called clear if it is above "
        f"{CLEAR:g} standard errors.",
        "",
    ]
    known = {table.name: (table, results(table, store)) for table in tables_of(is_quick)}
    for table, found in known.values():
        if found:
            lines += [*_table(table, found), ""]
    drawn = [name for name in FIGURE_1 if known[name][1]]
    if drawn:
        lines += ["## Figure 1. How noise on the weights slows training", ""]
        lines += [
            f"Epochs until the validation accuracy is within {100 * speed.NEAR:g} points of the best without noise.",
            "",
        ]
        for name in drawn:
            lines += [*speed.lines(known[name][0], store), ""]
    for table, found in known.values():
        if found and table.over == "epsilon":
            lines += [*_chosen(table, found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table, found: Results) -> Iterator[str]:
    """One row per value; columns are the paper's methods, then ours."""
    number = f"Table {table.name}" if table.name.isdigit() else f"Beside table {table.name.partition('-')[0]}"
    yield f"## {number}. {table.title}"
    yield ""
    ours = _OURS[table.over]
    if any(changes.get("clip") == "batch" for changes in table.methods.values()):
        ours += _BY_MICROBATCH
    if any("noised" in method for method in table.methods):
        ours += _RELEASED
    yield f"**Shortened: {table.shortened}.** {ours}" if table.shortened else ours
    for family in table.families:
        papers = [method for name, method in table.claims if name == family]
        yield ""
        heads = [table.over, *(f"paper: {method}" for method in papers), *table.methods, "seeds"]
        yield f"| {family}: " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        for value in table.values:
            claims = [table.claims[family, method].get(value, "") for method in papers]
            cells = {method: found.get((family, method, value), []) for method in table.methods}
            counts = sorted({len(runs) for runs in cells.values() if runs})
            seeds = " to ".join(map(str, dict.fromkeys((*counts[:1], *counts[-1:]))))
            entries = [f"{value:g}", *claims, *map(_entry, cells.values()), seeds]
            yield "| " + " | ".join(entries) + " |"
    words = findings(table, found)
    if words:
        yield ""
        yield from (f"- {line}" for line in words)


def _entry(cells: list[Cell]) -> str:
    known = measured(cells)
    return str(known) if known is not None else str(cells[0]["failed"]) if cells else "not run"


def _chosen(table: Table, found: Results) -> Iterator[str]:
    """The chosen trials and their noise."""
    yield f"## Settings chosen for table {table.name}"
    yield ""
    yield "| network | method | epsilon | spent | noise multiplier | steps | setting |"
    yield "|---|---|---|---|---|---|---|"
    for (family, method, value), cells in found.items():
        done = [cell for cell in cells if "accuracy" in cell]
        if done:
            cell = max(done, key=lambda run: float(run["epsilon"]))
            words = f"{rounded_up(cell['epsilon'])} | {cell['noise_multiplier']:.4g} | {cell['steps']}"
            yield f"| {family} | {method} | {value:g} | {words} | `{cell['setting']}` |"
