"""Runs in several processes."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipwise.errors import ConfigurationError
from experiments.batch_clipping import training
from experiments.batch_clipping.paper import PAPER
from experiments.harness import workers
from experiments.harness.limits import Deadline, OutOfTimeError
from experiments.harness.paper import Options
from experiments.harness.runner import reproduce
from experiments.harness.workers import Workers, WorkersLostError


def options(folder, **given):
    return Options("batch-clipping", folder, figures=("2",), quick=True, **given)


def test_two_processes_give_what_one_gives(tmp_path):
    lines = []
    reproduce(options(tmp_path, workers=2), lines.append)
    cells = json.loads((tmp_path / "results.json").read_text())["cells"].values()
    assert len(cells) == 2 and not any("failed" in cell for cell in cells)
    assert all(0 < cell["accuracy"] <= 1 and cell["shown"][0]["figure"] == "2" for cell in cells)
    assert json.loads((tmp_path / "results.json").read_text())["commands"] == [
        "python -m experiments batch-clipping --figure 2 --device cpu --workers 2 --quick"
    ]


def test_a_process_that_is_lost_ends_the_command_and_keeps_the_rest(tmp_path, fake, monkeypatch):
    begin = Workers.begin

    def lose_the_second(self, task):
        future = begin(self, task)
        if len(fake) == 2:
            future = type(future)()
            future.set_exception(workers._lost(MemoryError()))
        return future

    monkeypatch.setattr(Workers, "begin", lose_the_second)
    lines = []
    store = reproduce(options(tmp_path), lines.append)
    assert len(store.cells) == 1 and any("fewer --workers" in line for line in lines)
    assert isinstance(workers._lost(MemoryError()), WorkersLostError)


def waiting():
    """A worker that takes long."""
    workers._prepare()
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(100)


COMMAND = """
import multiprocessing
from tests.experiments.harness.test_workers import waiting
worker = multiprocessing.get_context("spawn").Process(target=waiting)
worker.start()
worker.join()
"""


def is_alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_workers_end_with_a_command_that_is_killed():
    """Otherwise they would run for minutes and slow down other processes."""
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True) as command:
        pid = int(command.stdout.readline())
        assert is_alive(pid)
        command.kill()
    end = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)


@pytest.mark.parametrize("count", [0, -1])
def test_the_number_of_workers_is_checked(tmp_path, count):
    with pytest.raises(ConfigurationError, match=f"workers={count}"):
        Workers(options(tmp_path, workers=count), Deadline(None))


def test_what_a_run_came_to_is_kept_when_the_time_is_up(tmp_path, monkeypatch):
    def train(*_):
        raise OutOfTimeError({"public_accuracy_by_epoch": [0.25]})

    monkeypatch.setattr(training, "train", train)
    task = next(PAPER.tasks(options(tmp_path), {}))
    assert workers.run(task, options(tmp_path), None) == {"unfinished": True, "public_accuracy_by_epoch": [0.25]}


def test_an_unfinished_run_is_reported_and_continues_with_the_next_command(tmp_path, fake, monkeypatch):
    train = training.train

    def too_long(*given):
        train(*given)
        raise OutOfTimeError({"public_accuracy_by_epoch": [0.25, 0.5]})

    monkeypatch.setattr(training, "train", too_long)
    lines = []
    reproduce(options(tmp_path), lines.append)
    assert len(fake) == 2, "each is tried once a command"
    assert "| unfinished: 50.0 on the public tenth after 2 epochs |" in (tmp_path / "results.md").read_text()
    assert any("the time is up" in line for line in lines)
    monkeypatch.setattr(training, "train", train)
    store = reproduce(options(tmp_path), lines.append)
    assert len(fake) == 4 and all("accuracy" in cell for cell in store.cells.values())
    assert "unfinished" not in (tmp_path / "results.md").read_text()
