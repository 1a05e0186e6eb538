"""Folders of runs that the tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipwise.report.record import RunRecord
from tests.report.run_folders import run_folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run that was evaluated on held-out rows."""
    return run_folder(tmp_path_factory.mktemp("runs") / "income", noise_multiplier=1.6)


@pytest.fixture(scope="session")
def record(run: Path) -> RunRecord:
    return RunRecord.read(run)


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a given seed."""
    return run_folder(tmp_path_factory.mktemp("runs") / "seeded", steps=5, seed=3)


@pytest.fixture(scope="session")
def not_private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without differential privacy."""
    return run_folder(tmp_path_factory.mktemp("runs") / "not-private", private=False, evaluated=False)
