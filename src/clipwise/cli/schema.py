"""`clipwise schema`: a draft of the schema of a table, from its header or from noised counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from clipwise import accounting
from clipwise.accounting.calibrate import smallest_noise
from clipwise.cli.options import labels_of
from clipwise.cli.output import counted, rounded_up, say
from clipwise.errors import ConfigurationError
from clipwise.ledger import FileLedger
from clipwise.ledger.durable_files import require_writable
from clipwise.ledger.ledger import JSON
from clipwise.privacy import Entry
from clipwise.recipes.counts import STRING_SHARE, NoisedCounts
from clipwise.recipes.planning import default_delta
from clipwise.recipes.tables.read import listed, read_names
from clipwise.recipes.tables.schema import TASKS, Schema, Target, write_toml
from clipwise.recipes.tables.source import Findings, TableSource
from clipwise.validation.arguments import number, one_of

_HEAD = """Schema of a table, for `clipwise train --schema`. Declare what you know without looking at the rows: each
declared column saves privacy budget. Kinds of columns:
  kind = "number", bounds = [0, 120]                       numbers; beyond the bounds they are clipped
  kind = "category", values = ["no", "yes"]                these values; all others share one input
  kind = "hashed", buckets = 64                            text of unknown domain, hashed
  kind = "date", bounds = ["2000-01-01", "2030-12-31"]
  kind = "ignored"                                         not used
  kind = "auto"                                            noised counts decide, for a share of the budget"""
_MISSING = "Cells that stand for a missing value, without regard to case."
_TARGET = """The column to predict. Labels that are public save budget: labels = ["no", "yes"]. Of a number to predict,
give the range: range = [0, 100]."""


def schema(
    data: Annotated[Path, typer.Argument(help="A CSV or Parquet file.")],
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("schema.toml"),
    labels: Annotated[
        str | None, typer.Option(help="The classes of the target, with commas, if they are public: no,yes.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="classification or regression.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Estimate the schema from the rows, for this budget.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="With --epsilon: by default well below one over the number of rows.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="With --epsilon: the ledger to charge; by default OUT with the ending .ledger.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="The encoding of a CSV file; by default UTF-8.")] = None,
) -> None:
    """Write a draft of a schema: the kinds, ranges and values of the columns of a table.

    From the header line alone, which is public; complete the draft by hand:

        clipwise schema data.csv --target income

    With noised counts of the rows, charged to a ledger:

        clipwise schema data.csv --target income --epsilon 0.5

    A schema is for `clipwise train data.csv --schema schema.toml`.
    """
    if task is not None:
        one_of("--task", task, TASKS)
    names = read_names(data, encoding)
    wanted = None if target is None else Target(target, task, labels_of(labels))
    if target is not None and target not in names:
        raise ConfigurationError(f"--target {target!r} is no column of {data}. Its columns are {listed(names)}.")
    if target is None and (labels or task):
        raise ConfigurationError("--labels and --task need --target, the column to predict.")
    if out.exists():
        raise ConfigurationError(f"--out {out} exists already: name another file, or delete it.")
    require_writable("--out", out)
    draft = Schema.undeclared(names, wanted)
    if epsilon is None:
        if ledger is not None:
            raise ConfigurationError("--ledger needs --epsilon: the header alone costs no privacy.")
        note = "Only the names are known: declare the column, or leave the decision to noised counts."
        _write(out, draft, {name: note for name in draft.columns}, _HEAD)
        size = counted(len(draft.columns), "column")
        say(f"Draft with {size} written to {out}, from the header alone. It cost no privacy.")
        return
    number("--epsilon", epsilon, above=0)
    charged = ledger or out.with_suffix(".ledger")
    source = TableSource(data, schema=draft, encoding=encoding)
    delta = default_delta(len(source)) if delta is None else number("--delta", delta, above=0, below=1 / len(source))
    found, spent = _counted(source, epsilon, delta, charged)
    complete = Schema({name: found.kinds[name] for name in draft.columns}, found.target if wanted else None)
    cost = f"epsilon {rounded_up(spent)} at delta {delta:g} (zero-out of one row)"
    head = (
        f"{_HEAD}\n\nKinds, ranges and values are from noised counts of {len(source)} rows, for {cost}.\n"
        f"Count the ledger {charged.name} together with those of a run on these rows. The larger epsilon counts:\n"
        f"clipwise epsilon --ledger {charged.name} --ledger runs/NAME/ledger\n"
        f"clipwise epsilon --ledger {charged.name} --ledger runs/NAME/evaluation.ledger"
    )
    comments = {name: f"Noised counts: {text}." for name, text in found.about.items()}
    if found.label_counts:
        comments["[target]"] = "The labels are from noised counts."
    elif wanted is not None and found.target != wanted:
        comments["[target]"] = "The range is from noised counts."
    _write(out, complete, comments, head)
    size = counted(len(complete.columns), "column")
    say(f"Draft with {size} written to {out}. It cost {cost}, charged to {charged}.")


def _counted(source: TableSource, epsilon: float, delta: float, path: Path) -> tuple[Findings, float]:
    """Noised counts of all rows with the noise for this budget, charged before they are drawn; and their cost."""
    string_delta = delta * STRING_SHARE
    event = NoisedCounts(1.0, lambda event: None, delta=string_delta).event(strings=True)
    noise = smallest_noise(event, 1, epsilon, delta)
    charged: list[Entry] = []
    header: dict[str, JSON] = {"dataset_size": len(source), "recipe": "schema of a table"}
    with FileLedger(path, header=header, join=path.exists()) as ledger:
        counts = NoisedCounts(noise, ledger.charge, delta=string_delta)
        found = source.count(np.arange(len(source)), counts)
        charged = ledger.history()
    return found, accounting.epsilon_of(charged[-1:], delta)


def _write(out: Path, schema: Schema, comments: dict[str, str], head: str) -> None:
    comments = {"missing": _MISSING, "[target]": _TARGET} | comments
    out.write_text(write_toml(schema, comments, head), encoding="utf-8")
