"""Results of training runs as JSON and as a Markdown table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from clipwise.privacy import rounded_up


def write(folder: Path, results: dict[str, Any]) -> None:
    """`results.json` and `results.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(_markdown(results))


def _markdown(results: dict[str, Any]) -> str:
    where, runs = results["environment"], results["runs"]
    by_budget = [
        [run for run in runs if run["budget"] == budget] for budget in dict.fromkeys(run["budget"] for run in runs)
    ]
    lines = [
        "# Test accuracy of the one-block Transformer on the IMDB sample",
        "",
        f"    {results['command']}",
        "",
        f"On {where.get('gpu', where['cpu'])}, torch {where['versions']['torch']}. Always naming the test file's "
        f"commoner class is right for {results['commoner_class']:.1%}.",
        "",
        "| privacy of one run | mean test accuracy | range over seeds | seeds |",
        "|---|---|---|---|",
        *map(_row, by_budget),
    ]
    return "\n".join(lines) + "\n"


def _row(runs: list[dict[str, Any]]) -> str:
    """The runs with one budget, with the largest epsilon that one spent."""
    costs = [run["spent"] for run in runs if run["spent"] is not None]
    found = [run["accuracy"] for run in runs]
    privacy = "none"
    if costs:
        privacy = f"epsilon {rounded_up(max(cost['epsilon'] for cost in costs))}, delta {costs[0]['delta']:g}"
    span = f"{min(found):.1%} to {max(found):.1%}"
    return f"| {privacy} | {statistics.fmean(found):.1%} | {span} | {len(found)} |"
