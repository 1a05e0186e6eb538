"""Pieces of the pages of images and texts: tables of accuracies from the stored rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.media import HERE, Row


def stored(name: str) -> dict[str, Any] | None:
    """The results of an experiment, if there are any."""
    file = HERE / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def searched(rows: Sequence[Row], facts: Sequence[str]) -> list[str]:
    """One line for each data set, size and budget: the accuracy at each learning rate."""
    lines = ["| " + " | ".join([*facts, "epsilon", "accuracy in % (learning rate)"]) + " |"]
    lines.append("|---" * (len(facts) + 2) + "|")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[fact] for fact in facts), row["epsilon"]), []).append(row)
    for key, members in groups.items():
        best = max(row["accuracy"] for row in members)
        cells = (_cell(row, row["accuracy"] == best) for row in members)
        lines.append("| " + " | ".join([*map(_text, key[:-1]), f"{key[-1]:g}", ", ".join(cells)]) + " |")
    return lines


def judged(rows: Sequence[Row]) -> list[str]:
    """One line for each data set, model and budget: test accuracy, noise and time."""
    lines = ["| data | model | training records | epsilon | test accuracy in % | runs | z | steps | seconds |"]
    lines.append("|---" * 9 + "|")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["settings"]["model"], row["rows"], row["epsilon"]), []).append(row)
    for (data, model, size, epsilon), members in groups.items():
        found = [100 * row["accuracy"] for row in members]
        spread = f" ± {statistics.stdev(found) / len(found) ** 0.5:.2f}" if len(found) > 1 else ""
        first = members[0]
        seconds = statistics.median(row["seconds"] for row in members)
        cells = (
            data, model, size, f"{epsilon:.4g}", f"{statistics.fmean(found):.2f}{spread}", len(found),
            f"{first['noise_multiplier']:.3g}", first["steps"], f"{seconds:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def how(results: Iterable[dict[str, Any] | None]) -> list[str]:
    """Commands, hardware and versions."""
    known = [each for each in results if each is not None]
    lines = [f"    {each['command']}" for each in known]
    places = []
    for found in (each["environment"] for each in known):
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        places.append(
            f"On {found['cpu']}, {found['cores']} cores shared with other work, {found['threads']} thread, Python "
            f"{found['python']}, {versions}. Times are those of a busy machine."
        )
    return [*lines, "", *dict.fromkeys(places), ""]


def write_page(file: Path, lines: Iterable[str]) -> None:
    """Write a page of Markdown."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines).rstrip("\n") + "\n")


def _cell(row: Row, is_best: bool) -> str:
    accuracy = f"{100 * row['accuracy']:.1f}"
    return f"{f'**{accuracy}**' if is_best else accuracy} ({row['settings']['learning_rate']:.3g})"


def _text(value: Any) -> str:
    return "as they are" if value is None else f"{value}"
