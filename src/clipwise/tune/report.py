"""The report of a search: a Markdown page, a JSON file and a plot."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from clipwise.ledger.durable_files import replace_file
from clipwise.privacy import rounded_up
from clipwise.report.plots import METADATA, STYLE
from clipwise.tune.selection import composed_epsilon
from clipwise.tune.subject import Point, front

RESULTS = "results.json"


def write(name: str, points: Sequence[Point], out: Path) -> list[Path]:
    """Write results.json, front.md and, if matplotlib is installed, front.svg; returns the files.

    Results of another study in the folder are kept: those of this study then go into a subfolder.
    """
    out = _place(name, out)
    trials = [{key: getattr(p, key) for key in ("number", "accuracy", "epsilon", "settings")} for p in points]
    stored = {"study": name, "trials": trials, "front": [p.number for p in front(points)]}
    results, page = json.dumps(stored, indent=1) + "\n", markdown(name, points)
    files = [out / RESULTS, out / "front.md"]
    replace_file(files[0], lambda file: file.write(results.encode()), mode=0o644)
    replace_file(files[1], lambda file: file.write(page.encode()), mode=0o644)
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return files
    return [*files, _plot(name, points, out / "front.svg")]


def _place(name: str, folder: Path) -> Path:
    """The folder, or the first subfolder named after the study that holds no results of another study."""
    below = folder / re.sub(r"[^\w-]", "-", name)  # without the dots of the files here and of `..`
    numbered = (below.with_name(f"{below.name}-{number}") for number in count(2))
    return next(place for place in chain([folder, below], numbered) if _is_free(name, place))


def _is_free(name: str, folder: Path) -> bool:
    """Whether the folder has no results, or only those of the same study."""
    try:
        stored = json.loads((folder / RESULTS).read_bytes())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # not a folder, or not a results file
        return False
    return isinstance(stored, dict) and stored.get("study") == name


def markdown(name: str, points: Sequence[Point]) -> str:
    """The front as a table, and the cost of the search."""
    head, *rows = table(points)
    lines = [f"# {name}: accuracy against epsilon", "", f"{len(points)} runs; those that no other beats:", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", *cost_in_words(points)]) + "\n"


def table(points: Sequence[Point]) -> list[list[str]]:
    """The head and the rows of a table of the front."""
    best = front(points)
    names = list(best[0].settings) if best else []
    rows = [[rounded_up(p.epsilon), f"{p.accuracy:.2%}", *(_short(p.settings.get(n)) for n in names)] for p in best]
    return [["epsilon", "accuracy", *names], *rows]


def cost_in_words(points: Sequence[Point]) -> list[str]:
    """The cost of the search in sentences."""
    lines = [
        "Epsilon is that of one run. The scores are accuracies on held-out records, without noise, and the search "
        "depends on them. On public data that costs nothing. On private records this choice has no guarantee: tune on "
        "public data, or use `clipwise tune --accounted`."
    ]
    runs, cost = len(points), composed_epsilon(points)
    if cost is not None:
        epsilon, delta = cost
        lines.append(
            f"If the settings of all {runs} runs had been fixed in advance, releasing all {runs} models would cost "
            f"epsilon {rounded_up(epsilon)} at delta {delta:.3g}."
        )
    return lines


def _plot(name: str, points: Sequence[Point], file: Path) -> Path:
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        canvas = importlib.import_module("matplotlib.figure").Figure(figsize=(5.2, 3.8), layout="constrained")
        axes = canvas.subplots()
        axes.plot([p.epsilon for p in points], [p.accuracy for p in points], "o", color="0.7", markersize=4)
        best = front(points)
        line = {"where": "post", "color": "black", "markersize": 4, "label": "Pareto front"}
        axes.step([p.epsilon for p in best], [p.accuracy for p in best], "o-", **line)
        axes.set_xscale("log")
        axes.set_xlabel("epsilon of one run")
        axes.set_ylabel("validation accuracy")
        axes.set_title(name, loc="left", fontsize=9)
        axes.legend(frameon=False)
        canvas.savefig(file, format="svg", metadata=METADATA[".svg"])
    return file


def _short(value: Any) -> str:
    """Formats a setting for a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
