"""Folders of runs as `clipwise train` leaves them, with real ledgers of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clipwise import FileLedger
from clipwise.privacy import Adjacency, Event, Sampling, Unit
from tests.runs import private_run, train

TABLE = "CSV with the columns age, income, city and target"
LINES = ("age and income: ranges declared in schema.toml", "city: 5 categories, released with noise")


def run_folder(
    folder: Path,
    *,
    steps: int = 20,
    evaluated: bool = True,
    private: bool = True,
    name: str | None = None,
    description: str = TABLE,
    group: str = "north",
    **options: Any,
) -> Path:
    """A run's folder; `options` are those of `make_private`."""
    folder.mkdir(parents=True)
    epsilon = "4.0" if private else '"none"'
    (folder / "config.toml").write_text(
        f"""
[run]
name = {json.dumps(name or folder.name)}
command = "clipwise train data.csv --target income --epsilon 4"
created = "2026-11-18T21:00:00"

[data]
kind = "table"
path = "data.csv"
target = "income"
rows = 50
description = {json.dumps(description)}

[encoding]
preprocessing = {json.dumps(LINES)}

[privacy]
epsilon = {epsilon}
delta = 1e-5
adjacency = "zero-out"
unit = "record"
counts_share = 0.1

[training]
model = "mlp"
batch_size = 8
epochs = 4.0
learning_rate = 0.5
optimizer = "sgd"
steps = {steps}

[evaluation]
rows = 10
released = ["accuracy"]

[versions]
python = "3.11.7"
"""
    )
    lines: list[dict[str, Any]] = [
        {
            "kind": "progress",
            "epoch": 1.0,
            "step": 5,
            "steps": steps,
            "epsilon": 1.1,
            "accountant": "rdp",
            "seconds": 1.0,
        }
    ]
    figures = [("accuracy", None, 0.83, 0.79, 0.87), ("accuracy", group, 0.80, 0.71, 0.89)]
    for figure, of, value, low, high in figures:
        rows = "held-out" if evaluated else "public-test"
        shared = {"kind": "released", "name": figure, "confidence": 0.95, "rows": rows, "group": of, "step": steps}
        lines.append({**shared, "value": value, "low": low, "high": high})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if private:
        model, run = private_run(ledger=folder / "ledger", delta=1e-5, **options)
        train(model, run, steps)
        run.close()
        if evaluated:
            charge_evaluation(folder)
    return folder


def charge_evaluation(folder: Path, noise_multiplier: float = 2.0, unit: Unit = Unit.RECORD) -> None:
    """A ledger of one release on 10 held-out rows."""
    with FileLedger(folder / "evaluation.ledger", header={"dataset_size": 10}) as ledger:
        ledger.charge(Event(Sampling.FULL, Adjacency.ZERO_OUT, unit, noise_multiplier, 1.0))


def with_audit(folder: Path, run: str, ok: bool = True, mu: float = 0.4) -> Path:
    """An audit.json as `clipwise audit --json` prints it."""
    measured = {"attack": "dirac canary", "runs": 100, "guesses": 200, "right": 120, "epsilon": 0.9, "mu": mu}
    attack = {
        "claimed": {"epsilon": 4.0, "delta": 1e-5, "mu": 1.2, "accuracy": 0.7},
        "measured": {**measured, "confidence": 0.95, "exceeds": not ok, "accuracy": 0.6},
    }
    content = {"format": 1, "run": run, "ok": ok, "neighbours": {"ok": True, "findings": []}, "attacks": [attack]}
    (folder / "audit.json").write_text(json.dumps(content))
    return folder
