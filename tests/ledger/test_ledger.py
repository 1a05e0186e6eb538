from __future__ import annotations

import json
import math
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clipwise
from clipwise.errors import ConfigurationError, LedgerBusyError, LedgerError
from clipwise.ledger import crash_points, file_format, ledger
from clipwise.ledger.file_format import LARGEST_BLOCK, LEAST_BLOCK, LedgerState
from clipwise.ledger.ledger import FileLedger, MemoryLedger, read
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit

A = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.1, 256 / 60000)
B = Event(Sampling.SHUFFLED, Adjacency.REPLACE_ONE, Unit.USER, 0.1 + 0.2, 1 / 3, period=3)
HEADER = {"dataset_size": 60000, "shapes": {"w": [10, 784]}}


def crash(open_ledger: FileLedger) -> None:
    """End as a killed process does: the lock is released, nothing is written."""
    open_ledger._file.close()


def charge(open_ledger: ledger.Ledger, event: Event, times: int = 1) -> None:
    for _ in range(times):
        open_ledger.charge(event)


def put(path: Path, data: bytes) -> None:
    """Write a new file: some file systems wait for the disk when one is cut to nothing and filled again."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def file_of(path: Path, *events: tuple[Event, int], close: bool = True) -> bytes:
    open_ledger = FileLedger(path, header=HEADER)
    for event, times in events:
        charge(open_ledger, event, times)
    (open_ledger.close if close else lambda: crash(open_ledger))()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of fsync instead of waiting for the disk."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    return calls


# What is counted


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_counts_releases_in_order(kind: str, path: Path) -> None:
    with MemoryLedger() if kind == "memory" else FileLedger(path) as open_ledger:
        assert (open_ledger.position, open_ledger.history()) == (0, [])
        for n in range(1, 11):
            open_ledger.charge(A)
            assert (open_ledger.position, open_ledger.history()) == (n, [Entry(A, n)])
        charge(open_ledger, B, 5)
        charge(open_ledger, A, 1)
        assert open_ledger.history() == [Entry(A, 10), Entry(B, 5), Entry(A, 1)]
        assert open_ledger.position == 16
    assert open_ledger.position == 16  # the count can be read after the end


def test_what_is_written_is_read(path: Path) -> None:
    with FileLedger(path, header=HEADER) as open_ledger:
        charge(open_ledger, A, 70)
        charge(open_ledger, B, 2)
    found = read(path)
    assert (found.run, found.header, found.position) == (open_ledger.run, HEADER, 72)
    assert found.history == [Entry(A, 70), Entry(B, 2)]  # events with floats are restored exactly
    assert found.clean and not found.torn


def test_run_ids_are_random_or_given(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        ids = {MemoryLedger().run, MemoryLedger().run, open_ledger.run}
    assert len(ids) == 3 and all(len(run) == 32 and int(run, 16) >= 0 for run in ids)
    assert MemoryLedger(run="abc").run == "abc"


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_nothing_is_merged_across_a_restart(kind: str, path: Path) -> None:
    with MemoryLedger() if kind == "memory" else FileLedger(path) as open_ledger:
        open_ledger.restart()  # nothing to part yet
        charge(open_ledger, B, 5)
        open_ledger.restart()
        open_ledger.restart()
        charge(open_ledger, B, 4)
        charge(open_ledger, A, 1)
        open_ledger.restart()
        charge(open_ledger, A, 1)
        expected = [Entry(B, 5), Entry(B, 4), Entry(A, 1), Entry(A, 1)]
        assert open_ledger.history() == expected
    if kind == "file":
        assert read(path).history == expected


def test_a_restart_with_nothing_to_part_writes_nothing(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        for times in (0, 3):
            charge(open_ledger, A, times)
            open_ledger.restart()
            before = path.read_bytes()
            open_ledger.restart()
            assert path.read_bytes() == before


def test_a_block_that_was_interrupted_before_use_leaves_no_trace(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        charge(open_ledger, B, 4)
        open_ledger.restart()
        open_ledger.charge(B)
        open_ledger._blocks[open_ledger.run].left += 1  # as if a signal had arrived between reserving and using
        assert open_ledger.history() == [Entry(B, 4)]
    with FileLedger(path) as open_ledger:
        open_ledger.charge(B)
    assert read(path).history == [Entry(B, 4), Entry(B, 1)]


def test_clean_end_gives_back_and_continues_in_the_same_entry(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        charge(open_ledger, A, 5)
        assert read(path).position == 7 and not read(path).clean  # 1 + 2 + 4 reserved
    assert read(path).position == 5
    with FileLedger(path) as again:
        assert (again.existing, again.run, again.position) == (True, open_ledger.run, 5)
        charge(again, A, 2)
    assert read(path).history == [Entry(A, 7)]
    assert not open_ledger.existing


def test_an_exactly_used_block_also_ends_cleanly(path: Path) -> None:
    file_of(path, (A, 3))
    assert read(path).clean
    with FileLedger(path) as again:
        again.charge(A)
    assert read(path).history == [Entry(A, 4)]


def test_opening_and_closing_adds_nothing(path: Path) -> None:
    before = file_of(path, (A, 3))
    FileLedger(path).close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_closed_refuses_and_close_is_idempotent(kind: str, path: Path) -> None:
    open_ledger = MemoryLedger() if kind == "memory" else FileLedger(path)
    open_ledger.charge(A)
    open_ledger.close()
    open_ledger.close()
    for call in (lambda: open_ledger.charge(A), open_ledger.restart, lambda: open_ledger.import_history([Entry(A, 1)])):
        with pytest.raises(LedgerError, match="closed"):
            call()
    assert open_ledger.history() == [Entry(A, 1)]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_import_history(kind: str, path: Path) -> None:
    entries = [Entry(A, 500), Entry(A, 7), Entry(B, 2)]
    with MemoryLedger() if kind == "memory" else FileLedger(path) as open_ledger:
        open_ledger.import_history([])
        open_ledger.import_history(entries)
        assert (open_ledger.history(), open_ledger.position) == (entries, 509)
        if kind == "file":
            assert read(path).history == entries  # durable at once
        open_ledger.charge(B)
        assert open_ledger.history() == [*entries, Entry(B, 1)]
        with pytest.raises(LedgerError, match="already holds"):
            open_ledger.import_history(entries)
    with pytest.raises(LedgerError, match="at least one"):
        MemoryLedger().import_history([Entry(A, 0)])


def test_an_import_is_all_or_nothing(path: Path, instant: list[int]) -> None:
    with FileLedger(path) as open_ledger:
        start = path.stat().st_size
        open_ledger.import_history([Entry(A, 500), Entry(B, 7)])
    data = path.read_bytes()
    for cut in range(start, len(data) - 1):
        put(path, data[:cut])
        with FileLedger(path) as again:
            assert again.position == 0
            again.import_history([Entry(A, 500), Entry(B, 7)])
        assert read(path).position == 507


# Crashes


def test_every_charge_is_on_disk_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = 0

    def fsync(file: int) -> None:
        nonlocal synced
        synced = os.fstat(file).st_size

    open_ledger = FileLedger(path)
    monkeypatch.setattr(os, "fsync", fsync)
    for n in range(1, 200):
        open_ledger.charge(A if n % 50 else B)
        assert path.stat().st_size == synced
        assert read(path).position >= n
    crash(open_ledger)


def test_a_new_file_has_its_name_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda file: kinds.append(stat.S_ISDIR(os.fstat(file).st_mode)))
    FileLedger(path).close()
    assert kinds == [False, True]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 63, 64, 65, 127, 128, 200, 1000])
def test_a_crash_overstates_within_bounds(n: int, path: Path, instant: list[int]) -> None:
    file_of(path, (A, n), close=False)
    assert n <= read(path).position < n + min(n, max(LEAST_BLOCK, n / 50), LARGEST_BLOCK)
    with FileLedger(path) as again:
        assert again.position == read(path).position


def test_block_bounds_what_a_crash_overstates(path: Path, instant: list[int]) -> None:
    for block in (1, 3):
        path.unlink(missing_ok=True)
        open_ledger = FileLedger(path, block=block)
        for n in range(1, 50):
            open_ledger.charge(A)
            assert n <= read(path).position < n + block
        crash(open_ledger)
    put(path, path.read_bytes() + b"{")
    assert read(path).position <= 49 + 2 + 3  # the rest of the block, and one for the torn line
    with pytest.raises(ConfigurationError, match="block"):
        FileLedger(path, block=0)


def test_an_end_that_was_not_clean_is_a_restart(path: Path) -> None:
    file_of(path, (B, 4), close=False)
    with FileLedger(path) as again:
        again.charge(B)
    assert read(path).history == [Entry(B, 7), Entry(B, 1)]


def test_a_torn_line_is_spent_as_a_whole_block_of_the_latest_event(path: Path) -> None:
    data = file_of(path, (A, 4), (B, 1), (A, 1), close=False)
    torn = b'{"kind":"rese'
    put(path, data + torn)
    found = read(path)
    assert found.torn and not found.clean
    assert found.history == [Entry(A, 4), Entry(B, 1), Entry(A, 1 + LEAST_BLOCK)]
    lines = data.splitlines(keepends=True)
    second = next(i for i, line in enumerate(lines) if b'"id":1' in line)
    put(path, b"".join(lines[: second + 1]) + torn)  # named only, not reserved yet
    assert read(path).history == [Entry(A, 4 + LEAST_BLOCK), Entry(B, LEAST_BLOCK)]


def test_before_the_first_event_a_torn_line_is_nothing(path: Path) -> None:
    put(path, file_of(path) + b'{"kind":"ev')
    assert read(path).torn and read(path).position == 0


def lived(path: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """A file with all kinds of line, and (bytes on disk, releases so far) after each charge."""
    log = [(0, 0)]
    for life in range(3):
        open_ledger = FileLedger(path, header=HEADER)
        found = open_ledger.position  # from a crash it may hold more than was released: count only ours below
        released = log[-1][1]
        for event, times in ((A, 5), (B, 1), (A, 12), (B, 9)):
            for _ in range(times):
                open_ledger.charge(event)
                released += 1
                log.append((path.stat().st_size, released))
            if life == 1:
                open_ledger.restart()
        assert open_ledger.position - found == 27
        if life == 0:
            open_ledger.close()
        else:
            crash(open_ledger)
            with path.open("ab") as file:
                file.write(b'{"kind":"reserve","ev' if life == 1 else b"")
    return path.read_bytes(), log


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["missing", "zeros"])
def test_no_cut_of_the_file_loses_a_release(tail: str, path: Path, instant: list[int]) -> None:
    data, log = lived(path)
    header = data.index(b"\n")
    for cut in range(len(data) + 1):
        released = max(n for size, n in log if size <= cut)
        rest = data[cut:].find(b"\n") if tail == "zeros" else 0
        put(path, data[:cut] + bytes(max(rest, 0)))
        if cut < header:  # the run has not begun
            assert released == 0
            continue
        found = read(path)
        assert found.position >= released
        with FileLedger(path, header=HEADER) as again:
            assert (again.position, again.history()) == (found.position, found.history)
            charge(again, B, 2)
        later = read(path)
        assert later.clean and later.position == found.position + 2
        assert path.read_bytes().startswith(data[:cut])  # nothing is ever taken away


def test_a_recovery_can_be_torn_too(path: Path, instant: list[int]) -> None:
    data = file_of(path, (A, 9), close=False) + b'{"kind":"reserve","event":0,"co'
    put(path, data)
    expected = read(path).position
    FileLedger(path).close()
    recovered = path.read_bytes()
    for cut in range(len(data), len(recovered) - 1):
        put(path, recovered[:cut])
        assert read(path).position == expected
        FileLedger(path).close()
        once = path.read_bytes()
        put(path, once[:-9])  # and once more
        FileLedger(path).close()
        assert read(path).position == expected and read(path).clean


LIVES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([(A, 1), (A, 3), (A, 70), (B, 1), (B, 6), None]), max_size=6),
        st.sampled_from(["close", "crash", "torn", "cut newline"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(lives=LIVES)
def test_positions_never_shrink_over_lives(lives: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lives") / "run.ledger"
    real, os.fsync = os.fsync, lambda file: None
    try:
        released, seen = {A: 0, B: 0}, 0
        for script, end in lives:
            open_ledger = FileLedger(path)
            assert open_ledger.position >= seen
            for step in script:
                if step is None:
                    open_ledger.restart()
                    continue
                before = open_ledger.position
                charge(open_ledger, *step)
                released[step[0]] += step[1]
                assert open_ledger.position == before + step[1]
                assert read(path).position >= open_ledger.position
            seen = open_ledger.position
            if end == "close":
                open_ledger.close()
                assert read(path).history == open_ledger.history()
            else:
                crash(open_ledger)
                data = path.read_bytes()
                put(path, {"torn": data + b'{"ki', "cut newline": data[:-1], "crash": data}[end])
            found = read(path)
            assert found.position >= seen
            for event, count in released.items():
                assert sum(e.count for e in found.history if e.event == event) >= count
    finally:
        os.fsync = real


KILLED = """
import os, sys
from clipwise.ledger import crash_points as faults
from clipwise import FileLedger
from clipwise.privacy import Adjacency, Event, Sampling, Unit

path, point, times = sys.argv[1], sys.argv[2], int(sys.argv[3])

def killer(here):
    global times
    times -= here == point
    if times == 0:
        os._exit(9)

faults.reached = killer
event = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 0.5)
open_ledger = FileLedger(path)
for n in range(1, 100):
    open_ledger.charge(event)
    os.write(1, b"%d\\n" % n)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["ledger.before-fsync", "ledger.after-fsync"])
def test_killed_at_a_reservation(point: str, path: Path) -> None:
    assert point in crash_points.POINTS
    source = str(Path(clipwise.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), point, "4"],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
    )
    assert run.returncode == 9
    charged = int(run.stdout.split()[-1])
    assert charged == 7  # 1 + 2 + 4; the next reservation never returned
    assert charged <= read(path).position <= 11
    with FileLedger(path) as again:
        assert again.position == read(path).position


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_ends_the_ledger(
    failure: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 7)

    def fail(file: int) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError if isinstance(failure, OSError) else KeyboardInterrupt):
            open_ledger.charge(A)
    with pytest.raises(LedgerError, match="closed"):
        open_ledger.charge(A)
    open_ledger.close()
    assert open_ledger.position == 7
    with FileLedger(path) as again:  # the lock is free, the file is sound, and it counts enough
        assert again.position >= 7


def test_a_full_disk_ends_the_ledger(path: Path) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 7)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(LedgerError, match="full"):
            open_ledger.charge(A)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read(path).torn and read(path).position >= 7


def test_a_settlement_that_fails_counts_the_whole_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 4)

    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match="cannot be written"):
            open_ledger.charge(B)
    assert open_ledger.history() == [Entry(A, 7)]


# Damage


def refused(path: Path, data: bytes, match: str = "checksum") -> None:
    put(path, data)
    for call in (read, FileLedger):
        with pytest.raises(LedgerError, match=match):
            call(path)
    assert path.read_bytes() == data


def test_a_changed_byte_is_found(path: Path, instant: list[int]) -> None:
    data = file_of(path, (A, 3), (B, 1), (A, 2))
    last = data.rindex(b"\n", 0, -1) + 1
    for place in range(last - 1):
        for bit in (0x01, 0x20):
            changed = bytearray(data)
            changed[place] ^= bit
            number = data[:place].count(b"\n") + 1
            refused(path, bytes(changed), match=rf"line {number}: wrong checksum.* changed or damaged")


def test_a_changed_last_line_is_refused_or_overstates(path: Path, instant: list[int]) -> None:
    data = file_of(path, (A, 9))
    outcomes = []
    for place in range(data.rindex(b"\n", 0, -1) + 1, len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        put(path, bytes(changed))
        try:
            assert read(path).torn and read(path).position >= 9 + LEAST_BLOCK
            outcomes.append("torn")
        except LedgerError:
            outcomes.append("refused")
    assert outcomes.count("refused") > len(outcomes) / 2  # it is torn only if it is incomplete


def test_lines_cannot_be_removed_moved_added_or_repeated(path: Path, instant: list[int]) -> None:
    lines = file_of(path, (A, 3), (B, 1), (A, 2)).splitlines(keepends=True)
    for i in range(len(lines) - 1):
        refused(path, b"".join(lines[:i] + lines[i + 1 :]))
        if i < len(lines) - 2:
            refused(path, b"".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]))
            refused(path, b"".join(lines[: i + 1] + lines[i:]))
            refused(path, b"".join([*lines[: i + 1], b"\n", *lines[i + 1 :]]))


def test_a_recovered_file_is_guarded_as_well(path: Path, instant: list[int]) -> None:
    torn = file_of(path, (A, 9), close=False) + b'{"kind":"rese'
    put(path, torn)
    with FileLedger(path) as again:
        again.charge(A)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = torn.count(b"\n")
    assert lines[bad].startswith(b'{"kind":"rese') and b"recovered" in lines[bad + 1]
    for i in range(len(lines) - 1):
        if i != bad:
            refused(path, b"".join([*lines[:i], lines[i][:-6] + b"\n", *lines[i + 1 :]]))
    refused(path, b"".join([*lines[: bad + 1], b"{}\n", *lines[bad + 1 :]]))
    refused(path, b"".join(lines[: bad + 1] + lines[bad + 2 :]))


def test_what_is_no_ledger_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        read(path)
    assert not path.exists()
    put(path, b"")
    with pytest.raises(LedgerError, match="empty"):
        read(path)
    refused(path, b"step,loss\n1,2.3\n", match="not a ledger")
    refused(path, b"\n", match="not a ledger")
    refused(path, file_of(path.with_name("other"))[:50], match="not a ledger")
    for call in (read, FileLedger):
        with pytest.raises(LedgerError, match="cannot be"):
            call(path.parent)
        with pytest.raises(LedgerError, match="cannot be"):
            call(path.parent / "missing" / "file")


def test_an_empty_file_is_begun(path: Path) -> None:
    path.touch()
    with FileLedger(path) as open_ledger:
        assert not open_ledger.existing


def test_another_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(file_format, "FORMAT", 3)
        data = file_of(path)
    refused(path, data, match="line 1: cannot be understood")


def test_lines_that_no_version_writes_are_refused(path: Path) -> None:
    refused(path, LedgerState().seal({"kind": "restart"}) + b"\n", match="line 1: cannot be understood")
    for record in ({"kind": "novel"}, {"kind": "header", "format": 1}, {"kind": "reserve", "event": 5, "count": 1}):
        path.unlink()
        with pytest.raises((ValueError, IndexError)), FileLedger(path) as open_ledger:
            open_ledger._append(record)
        refused(path, path.read_bytes(), match="line 2: cannot be understood")


# Writers


def test_one_writer_at_a_time(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        with pytest.raises(LedgerBusyError, match=r"run\.ledger is in use.*private\.close\(\)"):
            FileLedger(path)
        open_ledger.charge(A)
    FileLedger(path).close()


def test_a_refused_opening_holds_no_lock(path: Path) -> None:
    file_of(path)
    with pytest.raises(LedgerError, match="another run"):
        FileLedger(path, header={})
    FileLedger(path).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_cannot_charge(path: Path) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 4)  # 3 of a block of 4 are left
    before = path.read_bytes()
    ready, stop = os.pipe(), os.pipe()
    worker = os.fork()
    if worker == 0:
        outcome = b"charged"
        try:
            open_ledger.charge(A)
        except LedgerError as error:
            outcome = b"refused" if "another process" in str(error) else b"unclear"
        open_ledger.close()
        os.write(ready[1], outcome)
        os.read(stop[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 100) == b"refused"
        assert path.read_bytes() == before
        charge(open_ledger, A, 2)
        open_ledger.close()
        FileLedger(path).close()  # the living worker does not keep the lock
        assert read(path).position == 6
    finally:
        os.write(stop[1], b"x")
        os.waitpid(worker, 0)


def test_threads_share_a_ledger(path: Path, instant: list[int]) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with FileLedger(path) as open_ledger:
            events = [A, Event.from_dict(A.to_dict())]  # equal, not identical: the comparison is a call
            workers = [threading.Thread(target=charge, args=(open_ledger, events[i % 2], 3000)) for i in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert open_ledger.position == 12000
    finally:
        sys.setswitchinterval(interval)
    assert read(path).history == [Entry(A, 12000)]


def test_another_run_is_refused_unless_it_joins(path: Path) -> None:
    data = file_of(path, (A, 3), close=False)
    other = {"dataset_size": 50000, "shapes": {"w": [10, 784]}, "clip": 1.0}
    with pytest.raises(LedgerError, match="to another run: it has another clip, dataset_size") as error:
        FileLedger(path, header=other)
    assert "50000" not in str(error.value)
    assert path.read_bytes() == data
    with FileLedger(path, header=other, join=True) as open_ledger:
        assert (open_ledger.existing, read(path).header, open_ledger.position) == (False, other, 3)
        open_ledger.charge(A)
    assert read(path).history == [Entry(A, 3), Entry(A, 1)]
    with FileLedger(path, header=other) as open_ledger:  # the joined run can continue
        open_ledger.charge(A)
    assert read(path).history == [Entry(A, 3), Entry(A, 2)] and read(path).header == other


def test_a_run_that_joins_is_never_merged(path: Path) -> None:
    file_of(path, (A, 3))
    with FileLedger(path, join=True) as open_ledger:
        open_ledger.charge(A)
        assert read(path).header == HEADER
    assert read(path).history == [Entry(A, 3), Entry(A, 1)]


def test_the_header_is_compared_as_it_is_stored(path: Path) -> None:
    FileLedger(path, header={"shape": (1, 2)}).close()
    FileLedger(path, header={"shape": [1, 2]}).close()
    for value in (float("nan"), object()):
        with pytest.raises(ConfigurationError, match="plain JSON"):
            FileLedger(path, header={"shape": value})  # type: ignore[dict-item]


# What it costs and what it shows


def test_reading_changes_nothing(path: Path) -> None:
    for data in (file_of(path, (A, 3)), path.read_bytes()[:-7], path.read_bytes() + b"{"):
        put(path, data)
        os.utime(path, ns=(1, 1))
        path.chmod(0o444)
        read(path)
        assert path.read_bytes() == data and path.stat().st_mtime_ns == 1
        path.chmod(0o644)
    with FileLedger(path):
        read(path)


def test_many_releases_make_a_small_file(path: Path, instant: list[int]) -> None:
    with FileLedger(path) as open_ledger:
        charge(open_ledger, A, 100_000)
    assert read(path).history == [Entry(A, 100_000)]
    assert path.stat().st_size < 2 * 100_000


def test_a_charge_costs_little(path: Path, instant: list[int]) -> None:
    with FileLedger(path) as open_ledger:
        instant.clear()
        start = time.process_time()
        charge(open_ledger, A, 10_000)
        elapsed = time.process_time() - start
        # One in 4 for 200 steps, then one in 2% of what was made, up to 3,200 steps, then one in 64.
        assert len(instant) <= 50 + 50 * math.log(16) + 6_800 / LARGEST_BLOCK + 20
        assert elapsed / 10_000 < 20e-6


def test_alternating_events_cost_one_fsync_each(path: Path, instant: list[int]) -> None:
    with FileLedger(path) as open_ledger:
        instant.clear()
        for _ in range(50):
            open_ledger.charge(A)
            open_ledger.charge(B)
        assert len(instant) <= 100 + 2
    assert read(path).position == 100


def test_the_file_shows_nothing_but_what_was_planned(path: Path, instant: list[int]) -> None:
    """The same charges at another pace write the same lines: no time and no size drawn is in the file."""

    def lines(pause: float) -> list[dict]:
        path.unlink(missing_ok=True)
        with FileLedger(path, header=HEADER) as open_ledger:
            for n in range(40):
                open_ledger.charge(A if n % 17 else B)
                time.sleep(pause)
        return [json.loads(line.rpartition(b" ")[0]) for line in path.read_bytes().splitlines()]

    fast, slow = lines(0), lines(0.002)
    assert len(fast[0].pop("run")) == len(slow[0].pop("run"))
    assert fast == slow
    allowed = {"kind", "format", "block", "header", "id", "event", "count", "used"}
    assert {key for line in fast for key in line} <= allowed


# What a run says about itself


def test_a_description_is_kept_and_charges_nothing(path: Path) -> None:
    with FileLedger(path, header=HEADER) as open_ledger:
        open_ledger.describe({"delta": 1e-5})
        charge(open_ledger, A, 3)
        open_ledger.describe({"delta": 1e-5})  # the same again: not written twice
        open_ledger.describe({"delta": 1e-6})  # in the middle of a reservation
        charge(open_ledger, A, 2)
        assert open_ledger.about == ({"delta": 1e-5}, {"delta": 1e-6})
    found = read(path)
    assert found.about == ({"delta": 1e-5}, {"delta": 1e-6})
    assert found.history == [Entry(A, 5)] and found.clean


def test_a_description_is_not_compared(path: Path) -> None:
    for version in ("1", "2"):
        with FileLedger(path, header=HEADER) as open_ledger:
            open_ledger.describe({"version": version})
            open_ledger.charge(A)
    assert [about["version"] for about in read(path).about] == ["1", "2"] and read(path).position == 2


def test_a_torn_description_hides_nothing(path: Path) -> None:
    with FileLedger(path) as open_ledger:
        open_ledger.describe({"delta": 1e-5})
    data = path.read_bytes()
    put(path, data[:-5])
    assert read(path).position == 0 and read(path).torn  # before the first event nothing can be released
    file_of(path := path.with_name("other"), (A, 3))
    with FileLedger(path) as open_ledger:
        open_ledger.describe({"delta": 1e-5})
    data = path.read_bytes()
    put(path, data[:-5])
    assert read(path).position == 3 + LEAST_BLOCK


def test_a_memory_ledger_has_a_description_too() -> None:
    open_ledger = ledger.MemoryLedger()
    open_ledger.describe({"delta": 1e-5})
    assert open_ledger.about == ({"delta": 1e-5},) and open_ledger.position == 0


# Reading


def test_reading_changes_neither_the_file_nor_its_folder(path: Path) -> None:
    data = file_of(path, (A, 5), close=False)
    os.utime(path, (1e9, 1e9))
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        read(path)
        assert path.read_bytes() == data and path.stat().st_mtime == 1e9 and list(path.parent.iterdir()) == [path]
    finally:
        path.parent.chmod(0o700)


def test_what_cannot_be_read_is_refused(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "pipe")
    for name, reason in (("", "directory"), ("pipe", "not a regular file"), ("none", "No such file"), ("\0", "null")):
        with pytest.raises(LedgerError, match=reason):
            read(path / name)


# Several runs


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_runs_in_turns_have_an_entry_each(kind: str, path: Path) -> None:
    with MemoryLedger() if kind == "memory" else FileLedger(path) as open_ledger:
        for _ in range(30):
            open_ledger.charge(B, "a")
            open_ledger.charge(B, "b")
        assert open_ledger.history() == [Entry(B, 30), Entry(B, 30)]
        assert [entry.run for entry in open_ledger.history()] == ["a", "b"]
        assert (open_ledger.made("a"), open_ledger.made("b"), open_ledger.made("c"), open_ledger.position) == (
            30,
            30,
            0,
            60,
        )
        open_ledger.restart("a")
        open_ledger.charge(B, "a")
        open_ledger.charge(B, "b")
        expected = [("a", 30), ("b", 31), ("a", 1)]
        assert [(entry.run, entry.count) for entry in open_ledger.history()] == expected
    if kind == "file":
        assert [(entry.run, entry.count) for entry in read(path).history] == expected


def test_runs_in_turns_do_not_cost_an_fsync_each(path: Path, instant: list[int]) -> None:
    with FileLedger(path) as open_ledger:
        instant.clear()
        for _ in range(100):
            open_ledger.charge(A, "a")
            open_ledger.charge(A, "b")
        assert len(instant) <= 2 * (3 + 100 / LEAST_BLOCK) + 1


def test_a_crash_spends_the_reservations_of_all_runs(path: Path) -> None:
    open_ledger = FileLedger(path)
    for _ in range(4):
        open_ledger.charge(B, "a")
        open_ledger.charge(B, "b")
    crash(open_ledger)
    assert read(path).history == [Entry(B, 7), Entry(B, 7)] and not read(path).clean
    put(path, path.read_bytes() + b'{"kind":"rese')
    torn = [Entry(B, 7 + LEAST_BLOCK), Entry(B, 7 + LEAST_BLOCK)]  # whichever of them the line was of
    assert read(path).history == torn
    with FileLedger(path) as again:
        again.charge(B, "a")
    assert read(path).history == [*torn, Entry(B, 1)]


def test_the_last_user_closes(path: Path) -> None:
    class User:
        pass

    open_ledger, one, other = FileLedger(path), User(), User()
    assert open_ledger.enter("a", one) and open_ledger.enter("b", other) and not open_ledger.enter("a", other)
    charge(open_ledger, A, 5)
    open_ledger.charge(A, "a")
    open_ledger.leave("a", one)
    open_ledger.charge(A, "b")
    open_ledger.leave("b", other)
    with pytest.raises(LedgerError, match="closed"):
        open_ledger.charge(A)
    assert read(path).clean and read(path).position == 7


# What a crash costs


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 8000))
def test_a_crash_overstates_by_at_most_two_percent_or_four(n: int) -> None:
    open_ledger = MemoryLedger()
    charge(open_ledger, A, n)
    reserved = open_ledger._state.total
    assert n <= reserved <= n + max(4, n / 50)


def test_a_short_run_loses_little(path: Path, instant: list[int]) -> None:
    """Killed at step 68 of 141."""
    file_of(path, (A, 68), close=False)
    assert read(path).position <= 72


# Whether the count is exact


def test_a_clean_end_is_exact(path: Path) -> None:
    file_of(path, (A, 70), (B, 2))
    assert read(path).exact
    with FileLedger(path) as open_ledger:
        assert open_ledger.exact
        charge(open_ledger, A, 3)
        assert open_ledger.exact and not read(path).exact  # a reader counts the reservation now
    assert read(path).exact


@pytest.mark.parametrize("end", [b"", b'{"kind":"rese'])
def test_what_a_crash_overstates_is_never_called_exact(path: Path, end: bytes) -> None:
    data = file_of(path, (A, 82), close=False)
    put(path, data + end)
    assert not read(path).exact
    with FileLedger(path) as open_ledger:  # and a clean end afterwards does not change that
        assert not open_ledger.exact
        charge(open_ledger, A, 3)
    assert read(path).clean and not read(path).exact


@pytest.mark.parametrize("later", ["close", "restart", "more"])
def test_a_charge_in_doubt_is_written_down(later: str, path: Path) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 2)
    open_ledger.doubt(open_ledger.run)
    assert not open_ledger.exact
    if later == "restart":
        open_ledger.restart()
    charge(open_ledger, A, 9 if later == "more" else 0)
    open_ledger.close()
    assert read(path).clean and not read(path).exact
    with FileLedger(path) as again:
        assert not again.exact


@pytest.mark.parametrize("exact", [True, False])
def test_an_import_is_as_exact_as_what_it_brings(exact: bool, path: Path) -> None:
    with FileLedger(path) as open_ledger:
        open_ledger.import_history([Entry(A, 5)], exact=exact)
        assert open_ledger.exact is exact
    assert read(path).exact is exact


# The file stays where it is


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("harm", [removed, replaced, shortened, moved])
def test_a_file_that_is_no_longer_there_is_noticed(harm: Callable[[Path], None], path: Path) -> None:
    open_ledger = FileLedger(path)
    charge(open_ledger, A, 4)  # 3 of the block are left: the next ones write nothing
    harm(path)
    for call in (
        lambda: open_ledger.charge(A),
        open_ledger.require_in_place,
        open_ledger.restart,
        lambda: open_ledger.describe({"a": 1}),
    ):
        with pytest.raises(LedgerError, match=r"run\.ledger was removed, replaced or shortened.*state_dict"):
            call()
    assert open_ledger.position == 4
    if harm is moved:
        path.with_name("elsewhere").rename(path)
        charge(open_ledger, A, 4)
        open_ledger.close()
        assert read(path).position == 8
        return
    with pytest.raises(LedgerError, match="was removed, replaced or shortened"):
        open_ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        open_ledger.charge(A)
    FileLedger(path.with_name("new")).close()


def test_a_change_of_folder_is_no_change_of_place(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(path.parent)
    with FileLedger(path.name) as open_ledger:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        charge(open_ledger, A, 9)
    assert read(path).position == 9
