"""A worker that was killed raises an error of clipwise; errors of the data set in a worker are passed on."""

from __future__ import annotations

import pytest

from clipwise.sampling.loader import _is_of_a_dead_worker


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), True),
        (EOFError(), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback"), False),
        (RuntimeError("shapes do not fit"), False),
        (EOFError("Caught EOFError in DataLoader worker process 0.\nOriginal Traceback"), False),
        (BrokenPipeError("Caught BrokenPipeError in DataLoader worker process 0."), False),
    ],
    ids=repr,
)
def test_a_dead_worker_is_distinguished_from_an_error_of_the_data_set(error: Exception, is_dead: bool) -> None:
    assert _is_of_a_dead_worker(error) is is_dead
