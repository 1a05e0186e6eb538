"""Logs of a run hold public values only."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise
from clipwise.integrations import logging
from clipwise.integrations.logging import CSVLog, JSONLog, RunLogger, TensorBoardLog, progress
from tests.runs import losses_of, private_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


class Recorded:
    """A sink with the method of a run of Weights & Biases."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], *, step: int) -> None:
        self.entries.append((step, data))


def trained(*sinks: Any, every: int = 1, public: Any = None, **options: Any) -> clipwise.Private:
    model, private = private_run(**options)
    with RunLogger(private, *sinks, every=every, public=public) as log:
        for batch in private.loader:
            private.step(losses_of(model, batch))
            log.step()
    return private


def test_entries_hold_public_values_only() -> None:
    sink = Recorded()
    private = trained(sink, every=2, public=lambda: {"public_loss": torch.tensor(0.5)}, delta=1e-3)
    assert [step for step, _ in sink.entries] == [2, 4]
    for _, entry in sink.entries:
        assert entry.keys() == {"epsilon", "learning_rate", "public_loss"}
    assert sink.entries[-1][1]["epsilon"] < private.spent().epsilon


def test_files(tmp_path: Path) -> None:
    private = trained(CSVLog(tmp_path / "log.csv"), JSONLog(tmp_path / "log.jsonl"), delta=1e-3)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == len(entries) == 5
    assert float(rows[-1]["epsilon"]) == entries[-1]["epsilon"] == private.spent().epsilon
    assert entries[-1]["step"] == 5


def test_a_path_is_no_sink() -> None:
    _, private = private_run()
    with pytest.raises(clipwise.ConfigurationError, match="CSVLog"):
        RunLogger(private, "log.csv")  # type: ignore[arg-type]


def test_a_new_value_adds_a_column(tmp_path: Path) -> None:
    CSVLog(tmp_path / "log.csv").log({"epsilon": 1.0}, step=1)
    log = CSVLog(tmp_path / "log.csv")  # of a run that continues
    log.log({"epsilon_rdp": 2.0}, step=2)
    log.log({"epsilon_rdp": 3.0}, step=3)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines == ["step,epsilon,epsilon_rdp", "1,1.0,", "2,,2.0", "3,,3.0"]


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    private = trained(TensorBoardLog(tmp_path), delta=1e-3)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {"epsilon", "learning_rate"}
    assert found.Scalars("epsilon")[-1].value == pytest.approx(private.spent().epsilon)


def test_a_slow_accountant_is_replaced_by_a_named_bound_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_CHEAP_SECONDS", 0.0)
    sink = Recorded()
    private = trained(sink, epsilon=3.0, delta=1e-3, epochs=1)
    first, *others = [entry for _, entry in sink.entries]
    assert "epsilon" in first and all("epsilon" not in entry for entry in others)
    assert private.spent().epsilon <= others[-1]["epsilon_rdp"] <= 3.0 < private.spent(accountant="rdp").epsilon


def test_a_training_loss_is_refused() -> None:
    model, private = private_run()
    log = RunLogger(private, Recorded())
    for batch in private.loader:
        losses = losses_of(model, batch)
        private.step(losses)
        break
    with pytest.raises(clipwise.ConfigurationError, match="gradient history"):
        log.log({"loss": losses.mean()})
    with pytest.raises(clipwise.ConfigurationError, match="number"):
        log.log({"loss": "low"})


@pytest.mark.parametrize("bar", ["rich", "tqdm"])
def test_progress_bars_show_epsilon(bar: str, capsys: pytest.CaptureFixture[str]) -> None:
    if bar == "tqdm":
        pytest.importorskip("tqdm")
    model, private = private_run(delta=1e-3)
    for batch in progress(private, 2, bar=bar):
        private.step(losses_of(model, batch))
    assert private.steps == 10
    printed = capsys.readouterr()
    assert f"epsilon {private.spent().epsilon:.3g}" in printed.out + printed.err
