"""Several ledgers: their histories one after the other, and never one run twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import FileLedger, accounting
from clipwise.errors import ConfigurationError, LedgerError
from clipwise.ledger import multi_run
from clipwise.privacy import Entry, Sampling, Unit
from tests.cli.calls import EVENT, write_ledger

SHUFFLED = replace(EVENT, sampling=Sampling.SHUFFLED, sample_rate=0.25, period=4)


def test_histories_follow_each_other_and_epochs_are_not_merged(tmp_path: Path) -> None:
    paths = [write_ledger(tmp_path / name, 2, event=SHUFFLED) for name in ("a", "b")]
    history = multi_run.joint_history(multi_run.read_files(paths))
    assert history == [Entry(SHUFFLED, 2), Entry(SHUFFLED, 2)]
    # Two halves of two epochs: a record may have been in both, so this is not one epoch of four steps.
    assert accounting.epsilon_of(history, 1e-5) > accounting.epsilon_of([Entry(SHUFFLED, 4)], 1e-5)


def test_a_run_that_continued_in_two_ledgers_is_two_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with FileLedger(tmp_path / name) as open_ledger:
            open_ledger.import_history([Entry(EVENT, 3, "run")])
            open_ledger.charge(EVENT, "run")
    history = multi_run.joint_history(multi_run.read_files([tmp_path / "a", tmp_path / "b"]))
    assert [entry.count for entry in history] == [3, 1, 3, 1]
    assert len({entry.run for entry in history}) == 2


@settings(max_examples=10)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_total_is_never_below_any_of_its_runs(counts: list[int]) -> None:
    each = [[Entry(EVENT, count)] for count in counts]
    total = accounting.epsilon_of([entry for one in each for entry in one], 1e-5)
    assert all(total >= accounting.epsilon_of(one, 1e-5) * (1 - 1e-3) for one in each)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        multi_run.read_files([])
    unused = [write_ledger(tmp_path / name, 0) for name in ("a", "b")]
    with pytest.raises(LedgerError, match="no release"):
        multi_run.read_files(unused)


def test_one_file_with_two_guarantees_is_named(tmp_path: Path) -> None:
    path = tmp_path / "joined"
    with FileLedger(path) as open_ledger:
        open_ledger.charge(EVENT)
    with FileLedger(path, join=True) as open_ledger:
        open_ledger.charge(replace(EVENT, unit=Unit.USER))
    with pytest.raises(LedgerError, match=r"joined has releases .* no single guarantee"):
        multi_run.read_files([path])
