"""A rank is killed, hangs or raises: the others stop with an error, and the ledger counts all noise that was drawn."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipwise import FileLedger, PerExample, Private, distributed, make_private
from clipwise.engine import step as pipeline
from clipwise.errors import PrivacyWarning
from clipwise.ledger import crash_points, file_format
from tests.distributed import jobs
from tests.distributed.world import World, world

pytestmark = pytest.mark.integration

SAVED, STEPS = 2, 12
TIMEOUT, SHORT_TIMEOUT = 60.0, 3.0  # seconds; no rank is so slow that it waits that long
# Rank 0 reserves some steps at once, so its ledger is written in few of them. It is killed at the second time.
IN_LEDGER = ("ledger.before-fsync", "ledger.after-fsync")
IN_STEP = ("step.before-grad", "step.before-update", "loop")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hanging() -> None:
    time.sleep(60)


def raising() -> None:
    raise ValueError("the loss of record 17 is 3.5")


def begin(folder: Path, layout: str, timeout: float = TIMEOUT) -> tuple[Any, Private]:
    model = jobs.laid_out(jobs.network(), layout)
    return model, make_private(
        model,
        jobs.optimizer_of("sgd", model),
        jobs.data(),
        batch_size=8,
        noise_multiplier=1.0,
        clipping=PerExample(1.0),
        ledger=folder / "run.ledger",
        rank_timeout=timeout,
        **jobs.needs(layout),
    )


def log_noise(private: Private, folder: Path, rank: int) -> None:
    """Write a line before noise is drawn: the number of the release and what the ledger file holds by then."""
    noised = pipeline.noised

    def logged(*args: Any) -> Any:
        durable = file_format.read(folder / "run.ledger").position
        with open(folder / f"noise-{rank}", "a") as file:
            file.write(f"{private.steps} {durable}\n")
        return noised(*args)

    pipeline.noised = logged  # of every layout; the process ends with the test


def faulty(rank: int, folder: Path, layout: str, culprit: int, point: str, fault: Callable[[], None]) -> None:
    """Train with a checkpoint after some steps, then with a fault on one rank."""
    model, private = begin(folder, layout, SHORT_TIMEOUT if fault is hanging else TIMEOUT)
    hits: Counter[str] = Counter()

    def reached(here: str) -> None:
        hits[here] += 1
        if rank == culprit and here == point and hits[here] == 2:
            fault()

    with private:
        log_noise(private, folder, rank)
        jobs.train(model, private, SAVED)
        distributed.save(folder / "checkpoint", model, private)
        before, crash_points.reached = crash_points.reached, reached
        try:
            for _ in range(STEPS - SAVED):
                reached("loop")
                jobs.train(model, private, 1)
        finally:
            crash_points.reached = before


def ready(rank: int) -> None:
    """Answers when the process has started."""


def outcome(
    folder: Path, layout: str, culprit: int, point: str, fault: Callable[[], None]
) -> tuple[list[tuple[Any, str | None]], float]:
    """What the ranks return, and the seconds until the surviving rank has stopped."""
    with world(2) as ranks:
        ranks.run(ready)
        start = time.monotonic()
        if fault is not hanging:
            return ranks.outcomes(faulty, folder, layout, culprit, point, fault), time.monotonic() - start
        survivor = ask_one(ranks, 1 - culprit, folder, layout, culprit, point, fault)
        return survivor, time.monotonic() - start


def ask_one(ranks: World, rank: int, *args: Any) -> list[tuple[Any, str | None]]:
    """The outcome on one rank, without a wait for the other."""
    ranks.send(faulty, *args)
    found: list[tuple[Any, str | None]] = [(None, "hangs"), (None, "hangs")]
    found[rank] = ranks.receive(rank, 50)
    return found


def noise_lines(folder: Path) -> list[tuple[int, int]]:
    found = []
    for file in folder.glob("noise-*"):
        for line in file.read_text().splitlines():
            step, durable = map(int, line.split())
            found.append((step, durable))
    return found


def require_true_ledger(folder: Path) -> int:
    """No noise was drawn before its entry was on disk. Returns the number of releases with noise."""
    lines = noise_lines(folder)
    assert lines and all(durable > 0 for _, durable in lines)
    assert all(step <= durable for step, durable in lines)
    drawn = max(step for step, _ in lines)
    assert file_format.read(folder / "run.ledger").position >= drawn
    with FileLedger(folder / "run.ledger") as ledger:  # the lock is free, and recovery counts no less
        assert ledger.position >= drawn
    return drawn


@pytest.mark.parametrize(
    ("layout", "culprit", "point"),
    [
        *(("plain", 0, point) for point in (*IN_LEDGER, *IN_STEP)),
        *(("plain", 1, point) for point in IN_STEP),
        ("fsdp", 0, "ledger.after-fsync"),
        ("fsdp", 1, "loop"),
        ("tensor", 0, "step.before-grad"),
        ("tensor", 1, "loop"),
    ],
)
def test_the_others_stop_when_a_rank_is_killed(tmp_path: Path, layout: str, culprit: int, point: str) -> None:
    found, _ = outcome(tmp_path, layout, culprit, point, killed)
    assert found[culprit] == (None, "ended")
    error = found[1 - culprit][1]
    assert error is not None and "clipwise.errors.DistributedError" in error, error
    require_true_ledger(tmp_path)


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_others_stop_when_a_rank_raises(tmp_path: Path, culprit: int) -> None:
    found, seconds = outcome(tmp_path, "fsdp", culprit, "loop", raising)
    assert "ValueError" in (found[culprit][1] or "")
    error = found[1 - culprit][1] or ""
    assert f"Rank {culprit} has stopped: ValueError" in error
    assert "record 17" not in error  # messages of other code may hold data
    assert seconds < TIMEOUT / 2
    require_true_ledger(tmp_path)


def test_the_others_stop_when_a_rank_hangs(tmp_path: Path) -> None:
    found, seconds = outcome(tmp_path, "plain", 1, "loop", hanging)
    assert "Rank 0 has waited 3 seconds for the other ranks" in (found[0][1] or "")
    assert SHORT_TIMEOUT <= seconds < 30  # the other one hangs for 60
    require_true_ledger(tmp_path)


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_a_broken_run_keeps_no_secret(tmp_path: Path, layout: str) -> None:
    """The rank that is left may not know whether the other one used the noise of the step."""
    outcome(tmp_path, layout, 1, "step.before-grad", killed)
    assert not list(tmp_path.glob("*.resume"))


def continued(rank: int, folder: Path, layout: str) -> int:
    model, private = begin(folder, layout)
    with private:
        distributed.load(folder / "checkpoint", model, private)
        jobs.train(model, private, 2)
        return private._context.ledger.position


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_run_continues_after_a_fault_and_counts_the_lost_steps(tmp_path: Path, culprit: int) -> None:
    outcome(tmp_path, "fsdp", culprit, "step.before-update", killed)
    drawn = require_true_ledger(tmp_path)
    assert drawn > SAVED
    counted = file_format.read(tmp_path / "run.ledger").position
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        steps = continued(0, tmp_path, "plain")  # on one rank
    assert steps == counted + 2 >= drawn + 2
