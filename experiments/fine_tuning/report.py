"""The page of results."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness import report
from experiments.harness.store import Cell, Store

from .encoder import LENGTH
from .train import BATCH, DELTA, MAX_NORM, SETTINGS

_NAMES = {"ag_news": "AG News", "imdb": "IMDB", "head": "head only", "lora": "LoRA", "full": "all weights"}


def page(store: Store, data: Sequence[str], methods: Sequence[str], budgets: Sequence[float | None], seeds: int) -> str:
    """The tables of test accuracy, with what was not run."""
    lines = [
        "# Private fine-tuning of a sentence encoder",
        "",
        "Test accuracy in percent, mean and standard error over seeds. all-MiniLM-L6-v2 (22 million parameters), first "
        f"{LENGTH} tokens of each text. Poisson sampling, expected batch {BATCH}, clipping at {MAX_NORM:g}, delta "
        f"{DELTA:g}, zero-out of one text, PLD. Without privacy: the same optimizer, epochs and batch size.",
        "",
    ]
    for name in data:
        lines += [f"## {_NAMES[name]}", "", "| trained | " + " | ".join(map(_title, budgets)) + " |"]
        lines += ["|---" * (len(budgets) + 1) + "|"]
        for method in methods:
            cells = [_cells(store, name, method, budget) for budget in budgets]
            shown = " | ".join(_entry(found, seeds) for found in cells)
            lines.append(f"| {_NAMES[method]} | {shown} |")
        lines.append("")
    lines += ["## Settings", "", "They were chosen before the first run and were not tuned on any text.", ""]
    for method, settings in SETTINGS.items():
        kind = "SGD with momentum 0.9" if method == "head" else "AdamW, linear decay"
        lines.append(f"- {_NAMES[method]}: {kind}, learning rate {settings.rate:g}, {settings.epochs} epochs.")
    lines += ["", "## Commands and machines", ""]
    lines += [f"    {command}" for command in store.commands]
    lines += [""] + [f"- {_machine(environment)}" for environment in store.environments]
    return "\n".join(lines) + "\n"


def _title(budget: float | None) -> str:
    return "not private" if budget is None else f"epsilon {budget:g}"


def _cells(store: Store, data: str, method: str, budget: float | None) -> list[Cell]:
    wanted = data, method, budget
    return [c for c in store.cells.values() if (c["data"], c["method"], c["budget"]) == wanted]


def _entry(cells: list[Cell], seeds: int) -> str:
    text = report.accuracy(cells)
    return f"{text} ({len(cells)} of {seeds} seeds)" if 0 < len(cells) < seeds else text


def _machine(environment: dict[str, object]) -> str:
    versions = environment["versions"]
    assert isinstance(versions, dict)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{environment.get('gpu', environment['cpu'])}, Python {environment['python']}, {named}"
