"""What is recorded about a run: its folder (`clipwise train`), or a ledger file alone."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clipwise import accounting
from clipwise.accounting.tradeoff import Tradeoff
from clipwise.errors import ConfigurationError
from clipwise.ledger import ledger
from clipwise.privacy import Entry
from clipwise.report import wording
from clipwise.report.statement import Statement, of_ledger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG, METRICS, LEDGER, EVALUATION, AUDIT = "config.toml", "metrics.jsonl", "ledger", "evaluation.ledger", "audit.json"
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Risks:
    """Bounds on attacks on any record of a run.

    A record is in the training rows or in the held-out rows, so each bound is the larger one of both ledgers.
    """

    curves: tuple[Tradeoff, ...]
    delta: float

    def missed(self, alpha: float) -> float:
        """The least rate of missed detections at this rate of false alarms: the trade-off curve."""
        return min(curve(alpha) for curve in self.curves)

    def power(self, alpha: float) -> float:
        """The largest detection rate at this rate of false alarms."""
        return max(curve.power(alpha) for curve in self.curves)

    def posterior(self, prior: float, alpha: float) -> float:
        """The largest probability of "in" after an alarm, for an attack with at least this rate of false alarms."""
        return max(curve.precision(alpha, prior) for curve in self.curves)

    @cached_property
    def advantage(self) -> float:
        """The largest detection rate minus rate of false alarms."""
        return max(curve.advantage() for curve in self.curves)

    @cached_property
    def mu(self) -> float:
        """The smallest mu for which the Gaussian curve G_mu, lowered by delta, is nowhere above that of the run."""
        return max(curve.mu(self.delta) for curve in self.curves)


@dataclass(frozen=True)
class RunRecord:
    """A run as recorded. Values that are not recorded are missing or None.

    Args:
        name: the name of the run.
        path: its folder, or its ledger file.
        config: the content of config.toml.
        metrics: the lines of metrics.jsonl.
        training: the statement of the ledger of training.
        evaluation: the statement of the ledger of the held-out rows.
        audit: the output of `clipwise audit --json`, if it is of this run.
    """

    name: str
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Mapping[str, Any], ...] = ()
    training: Statement | None = None
    evaluation: Statement | None = None
    audit: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str], delta: float | None = None) -> RunRecord:
        """Read a run's folder or a ledger file.

        Args:
            path: the folder or the file.
            delta: the delta to state; by default that of the run.
        """
        path = Path(path)
        if not path.exists():
            raise ConfigurationError(f"{path} does not exist: give the folder of a run, or a ledger file.")
        if not path.is_dir():
            found = of_ledger(path, delta)
            return cls(_name_of(path), path, training=found)
        config = _toml(path / CONFIG)
        if not config and not (path / LEDGER).exists():
            raise ConfigurationError(
                f"{path} is not the folder of a run: it has neither {CONFIG} nor a file named {LEDGER}. Give the "
                "folder that `clipwise train` wrote, or a ledger file."
            )
        if delta is None:
            delta = _number(_section(config, "privacy").get("delta"))
        training = of_ledger(path / LEDGER, delta) if (path / LEDGER).exists() else None
        held_out = path / EVALUATION
        has_releases = held_out.exists() and ledger.read(held_out).history
        evaluation = of_ledger(held_out, training.spent.delta if training else delta) if has_releases else None
        name = str(_section(config, "run").get("name") or path.resolve().name)
        record = cls(name, path, config, _lines(path / METRICS), training, evaluation)
        return record if training is None else _with_audit(record, path / AUDIT)

    def section(self, name: str) -> Mapping[str, Any]:
        """A table of config.toml; empty if there is none."""
        return _section(self.config, name)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def ledgers(self) -> tuple[Statement, ...]:
        """The statements of the ledgers."""
        return tuple(found for found in (self.training, self.evaluation) if found is not None)

    @property
    def progress(self) -> list[Mapping[str, Any]]:
        """The lines of metrics.jsonl about the course of training."""
        return [line for line in self.metrics if line.get("kind") == "progress"]

    @property
    def released(self) -> list[Mapping[str, Any]]:
        """The lines of metrics.jsonl about released figures: the last one of each name, group and set of rows."""
        latest = {
            (line.get("name"), str(line.get("group")), line.get("rows")): line
            for line in self.metrics
            if line.get("kind") == "released"
        }
        return list(latest.values())

    @property
    def closed(self) -> bool:
        """Whether the run was closed, with verified weights."""
        return self.training is not None and self.training.weights == wording.CLOSED

    @property
    def epsilon(self) -> float:
        """The larger epsilon of the ledgers, at `delta`."""
        return max((found.spent.epsilon for found in self.ledgers), default=math.inf)

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self.ledgers[0].spent.delta if self.ledgers else math.nan

    @cached_property
    def risks(self) -> Risks:
        """Bounds on attacks. Raises if the ledgers protect different units or have different neighbours."""
        self.require_one_unit()
        return Risks(tuple(accounting.tradeoff_of(found.history) for found in self.ledgers), self.delta)

    def require_one_unit(self) -> None:
        """Raise if training and evaluation do not protect the same unit under the same adjacency."""
        kinds = {(found.spent.adjacency, found.spent.unit) for found in self.ledgers}
        if len(kinds) > 1:
            raise ConfigurationError(
                f"{self.path}: {LEDGER} and {EVALUATION} have different adjacencies or units of privacy, so no single "
                "guarantee covers the run. To print the statement of a ledger, give its file instead of the folder."
            )

    @property
    def no_guarantee(self) -> str | None:
        """Why the run has no guarantee; None if it has one."""
        if self.training is None:
            if self.config and _number(self.section("privacy").get("epsilon")) is None:
                return "This run was trained without differential privacy. Its weights may reveal any training record."
            return "The ledger of this run is missing. Nothing is known about what its releases cost."
        if any(found.seeded for found in self.ledgers):
            return (
                "This run used a given seed. Anyone with the seed can subtract the noise, so no guarantee is claimed."
            )
        if self.training.weights == wording.NOT_VERIFIED:
            return (
                "When this run was closed, something other than its releases had changed the model. The ledger covers "
                "the released gradients, not this model."
            )
        if self.evaluation is None and any(line.get("rows") == HELD_OUT for line in self.released):
            return (
                "A figure on private held-out rows was released, and the ledger of that release is missing. Nothing "
                "is known about what it cost."
            )
        if math.isinf(self.epsilon):
            return "A release of this run had no noise, or too little of it. Epsilon is infinite."
        return None

    @property
    def dataset_size(self) -> int | None:
        """The number of rows of the whole data set, which is public."""
        rows = self.section("data").get("rows")
        return rows if isinstance(rows, int) else self.training_rows

    @property
    def training_rows(self) -> int | None:
        """The number of rows for training."""
        if self.training is not None and self.training.dataset_size is not None:
            return self.training.dataset_size
        rows, held_out = self.section("data").get("rows"), self.held_out_rows
        return rows - (held_out or 0) if isinstance(rows, int) else None

    @property
    def held_out_rows(self) -> int | None:
        """The number of held-out rows; None if there are none."""
        if self.evaluation is not None and self.evaluation.dataset_size is not None:
            return self.evaluation.dataset_size
        rows = self.section("evaluation").get("rows")
        return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows else None

    @property
    def preprocessing(self) -> tuple[str, ...]:
        """How records became inputs: lines of the encoder."""
        for place in (self.section("data"), self.section("encoding")):
            lines = place.get("preprocessing")
            if isinstance(lines, Sequence) and not isinstance(lines, str):
                return tuple(str(line) for line in lines)
        return ()

    def history(self) -> tuple[Entry, ...]:
        """The releases of training."""
        return self.training.history if self.training else ()


def _name_of(ledger_file: Path) -> str:
    """A ledger file that is called "ledger" has the name of its folder."""
    file = ledger_file.resolve()
    return file.parent.name if file.name == LEDGER else file.name


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float | None:
    """A number of config.toml; None for anything else, such as "none"."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    return content


def _lines(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The objects of a JSON lines file. A last line that was cut by a crash is left out."""
    if not path.exists():
        return ()
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigurationError(f"{path}, line {number}, is not JSON. Restore the file or remove it.") from error
        if isinstance(value, Mapping):
            found.append(value)
    return tuple(found)


def _with_audit(record: RunRecord, path: Path) -> RunRecord:
    """The record with its audit. An audit of another ledger is not used."""
    if not path.exists() or record.training is None:
        return record
    try:
        audit = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}. Write it with `clipwise audit RUN --json`, or remove it."
        ) from error
    if not isinstance(audit, Mapping) or audit.get("run") != record.training.run:
        raise ConfigurationError(
            f"{path} is not the output of `clipwise audit --json` for this run: its run is not that of the ledger. "
            "Repeat the audit, or remove the file."
        )
    return replace(record, audit=audit)
