"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.cell import Cell
from benchmarks.grid import Figure, figures
from benchmarks.methods import ONE_BY_ONE, PAPER_NAMES, all_methods
from benchmarks.records import Results, key_of
from benchmarks.workload import Setting

_LEAST_ROUNDS = 3
_FAST, _NAIVE = ("reweight", "bookkeeping"), ONE_BY_ONE


def markdown(results: Results) -> str:
    """The whole report: the environment, then a section for each figure."""
    notes = Notes()
    sections = [_figure(figure, results, notes) for figure in figures()]
    lines = ["# Measurements", "", *conditions(results), *(line for part in sections for line in part)]
    return "\n".join([*lines, *notes.section()])


class Notes:
    """Numbered remarks. Equal remarks share a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """The number of a remark, in brackets."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def section(self) -> list[str]:
        """All remarks, with their numbers."""
        numbered = [f"{number}. {text}" for number, text in enumerate(self.texts, 1)]
        return ["## Notes", "", *numbered, ""] if numbered else []


def shown(figure: Figure, results: Results) -> tuple[list[Setting], list[str]]:
    """The settings and the methods of a figure that have a cell."""
    settings = list(dict.fromkeys((*figure.settings, *(figure.on_cpu or ()), *figure.quick)))
    settings = [s for s in settings if any(cell_of(figure, s, m, results) for m in all_methods())]
    methods = [m for m in all_methods() if any(cell_of(figure, s, m, results) for s in settings)]
    return settings, methods


def cell_of(figure: Figure, setting: Setting, method: str, results: Results) -> Cell | None:
    """A cell, or None if it was not measured."""
    return results.cells.get(key_of(setting.key, method, largest=figure.largest_batch))


def label(method: str) -> str:
    """A method with its name in the paper."""
    return f"{method} ({PAPER_NAMES[method]})" if method in PAPER_NAMES else method


def conditions(results: Results) -> list[str]:
    """The environment and the commands of the results."""
    versions = results.environment.get("versions", {})
    facts = [f"- {name}: {value}" for name, value in results.environment.items() if name != "versions"]
    facts += [f"- {package} {version}" for package, version in versions.items()]
    commands = [f"    {run['command']}" for run in results.runs]
    return [*facts, "", "Made by:", "", *commands, ""]


def _figure(figure: Figure, results: Results, notes: Notes) -> list[str]:
    settings, methods = shown(figure, results)
    lines = [f"## {figure.title}", ""]
    if not settings:
        return [*lines, "Not measured.", ""]
    if len(settings) < len(figure.settings):
        lines += [f"Shortened: {len(settings)} of {len(figure.settings)} settings.", ""]

    def table(title: str, entry: Callable[[Cell], str]) -> list[str]:
        def text(setting: Setting, method: str) -> str:
            cell = cell_of(figure, setting, method, results)
            return "" if cell is None else _marked(cell, entry, notes)

        rows = [[_name(figure, s), *(text(s, m) for m in methods)] for s in settings]
        return [title, "", *grid(["", *map(label, methods)], rows), ""]

    if figure.largest_batch:
        return lines + table("Largest batch; one more does not fit.", lambda c: str(c["largest_batch"]))
    lines += table("Median milliseconds per step, and how many non-private steps that is:", _time)
    lines += table("Peak memory in MiB:", _memory)
    return lines + _speed_up(figure, settings, results)


def _marked(cell: Cell, entry: Callable[[Cell], str], notes: Notes) -> str:
    if "failed" in cell:
        return f"none {notes.mark(cell['failed'])}"
    marks = [notes.mark(note) for note in cell.get("notes", [])]
    return " ".join([entry(cell), *marks])


def _time(cell: Cell) -> str:
    short = "" if cell["rounds"] >= _LEAST_ROUNDS else f", {_rounds(cell['rounds'])}"
    return f"{1000 * cell['seconds']:.3g} ({cell['ratio']:.2f}x{short})"


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _memory(cell: Cell) -> str:
    return "" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 2**20:.0f}"


def _speed_up(figure: Figure, settings: Sequence[Setting], results: Results) -> list[str]:
    """How many times faster than the naive method: the quotient of the two ratios to non-private."""
    rows = []
    for setting in settings:
        naive = cell_of(figure, setting, _NAIVE, results)
        fast = [cell_of(figure, setting, method, results) for method in _FAST]
        if naive and "ratio" in naive and any(cell and "ratio" in cell for cell in fast):
            quotients = [f"{naive['ratio'] / c['ratio']:.1f}x" if c and "ratio" in c else "" for c in fast]
            rows.append([_name(figure, setting), *quotients])
    if not rows:
        return []
    return [f"Speed-up over {label(_NAIVE)}:", "", *grid(["", *map(label, _FAST)], rows), ""]


def _name(figure: Figure, setting: Setting) -> str:
    batch = "" if figure.largest_batch else f", B={setting.batch}"
    return f"{setting.model}, {setting.data}{batch}"


def grid(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
