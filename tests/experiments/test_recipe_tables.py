from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from clipwise import accounting
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from experiments.recipes import table_runs, tables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    rows = [f"{age},{'yes' if age > 40 else 'no'}" for age in random.integers(0, 80, 3000)]
    (tmp_path / "small.csv.gz").write_bytes(gzip.compress(("age,y\n" + "\n".join(rows)).encode()))
    monkeypatch.setattr(tables, "JUDGED_ON", {"small": ("small", "y")})
    monkeypatch.setitem(table_runs.JUDGED_ON, "small", ("small", "y"))
    monkeypatch.setattr(tables, "EPSILONS", (3.0,))
    return tmp_path


@pytest.mark.slow
def test_the_judged_table_is_written(folder: Path) -> None:
    tables.main(["--judge", "--data", str(folder), "--seeds", "1", "--out", str(folder / "results")])
    text = (folder / "results" / "tables_judged.md").read_text()
    assert "| small | 3 | clipwise, linear |" in text and "objective perturbation" in text


def test_counts_and_steps_together_are_within_the_budget(folder: Path) -> None:
    data = table_runs.prepared(folder, "small", 3.0, 0.1, 0)
    z = table_runs.noise_for(data.counts, 0.1, 50, 3.0)
    step = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, z, 0.1)
    spent = accounting.epsilon_of([Entry(data.counts[0], 1), Entry(step, 50)], table_runs.DELTA)
    assert 2.9 < spent <= 3.0 and len(data.train) == 2700
