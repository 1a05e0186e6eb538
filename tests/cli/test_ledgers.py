"""Commands on ledgers: they count all possible releases of one or several runs, and change no file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipwise import FileLedger, accounting
from clipwise.privacy import Adjacency, Entry, Sampling, Unit
from tests.cli.calls import EVENT, clipwise, figure, line, refused, write_ledger

COMMANDS = (["epsilon", "--ledger"], ["tradeoff", "--ledger"], ["statement"])


def epsilon_of(steps: int) -> float:
    return accounting.epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=steps, delta=1e-5)


# One ledger


@pytest.mark.parametrize("command", COMMANDS)
def test_reading_changes_nothing(tmp_path: Path, command: list[str]) -> None:
    path = write_ledger(tmp_path / "ledger", 100, close=False)
    os.utime(path, (1e9, 1e9))
    before = path.read_bytes()
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert clipwise(*command, path).exit_code == 0
        assert path.read_bytes() == before and path.stat().st_mtime == 1e9
        assert [p.name for p in tmp_path.iterdir()] == ["ledger"]
    finally:
        tmp_path.chmod(0o700)


def test_all_releases_are_counted(tmp_path: Path) -> None:
    result = clipwise("epsilon", "--ledger", write_ledger(tmp_path / "ledger", 100))
    assert epsilon_of(100) <= figure(result, "PLD") <= 1.001 * epsilon_of(100)
    assert "100 releases" in result.stdout and "cleanly" not in result.stdout


def test_a_ledger_that_is_in_use_is_counted_in_full(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "ledger", 100, close=False)  # blocks of 1, 2, 4, 4, 4, ...
    result = clipwise("epsilon", "--ledger", path)
    assert epsilon_of(103) <= figure(result, "PLD") <= 1.001 * epsilon_of(103)
    assert "did not end cleanly" in result.stdout


def test_an_incomplete_last_line_counts_the_most_it_can_stand_for(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "ledger", 100)
    torn = path.read_bytes()[:-9]
    path.write_bytes(torn)
    result = clipwise("epsilon", "--ledger", path)
    assert epsilon_of(107) <= figure(result, "PLD") <= 1.001 * epsilon_of(107)
    assert "incomplete" in result.stdout and path.read_bytes() == torn


def _tampered(path: Path) -> None:
    write_ledger(path, 100)
    path.write_bytes(path.read_bytes().replace(b'"count":4', b'"count":3'))


def _cut(path: Path) -> None:
    write_ledger(path, 100)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (_tampered, "checksum"),
        (_cut, "checksum"),
        (lambda path: path.write_bytes(bytes(range(256)) * 9), "not a ledger"),
        (lambda path: path.write_text("{}\n"), "not a ledger"),
        (lambda path: path.touch(), "empty"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: None, "No such file"),
        (lambda path: os.mkfifo(path), "regular file"),
        (lambda path: write_ledger(path, 0), "no release"),
    ],
)
def test_a_file_that_is_not_a_ledger_is_refused(tmp_path: Path, command: list[str], make: Any, word: str) -> None:
    path = tmp_path / "ledger"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    if word == "directory" and command[0] == "statement":
        word = "not the folder of a run"  # a statement is also made for the folder of a run
    refused(clipwise(*command, path), str(path), word)
    assert (path.read_bytes() if path.is_file() else None) == before


# Several


def test_several_runs_add_up(tmp_path: Path) -> None:
    other = replace(EVENT, noise_multiplier=2.0)
    a = write_ledger(tmp_path / "a", 60)
    b = write_ledger(tmp_path / "b", 40, event=other)
    result = clipwise("epsilon", "--ledger", a, "--ledger", b)
    total = accounting.epsilon_of([Entry(EVENT, 60), Entry(other, 40)], 1e-5)
    assert total <= figure(result, "PLD") <= 1.001 * total
    assert total < figure(result, "Renyi filter") and "report this one" in line(result, "Renyi filter  ")
    assert "All other figures hold if all runs were fixed before the first release" in result.stdout
    assert "100 releases of 2 runs together" in result.stdout and not result.stderr
    for path, event, steps in ((a, EVENT, 60), (b, other, 40)):
        alone = accounting.epsilon_of([Entry(event, steps)], 1e-5)
        assert alone <= figure(result, f"{path} alone: epsilon") <= 1.001 * alone
    both = clipwise("tradeoff", "--ledger", a, "--ledger", b)
    assert figure(both, "guesses right, if both are equally likely") > figure(
        clipwise("tradeoff", "--ledger", a), "guesses right, if both are equally likely"
    )


def test_a_run_without_releases_adds_nothing(tmp_path: Path) -> None:
    a, b = write_ledger(tmp_path / "a", 60), write_ledger(tmp_path / "b", 0)
    alone, both = clipwise("epsilon", "--ledger", a), clipwise("epsilon", "--ledger", a, "--ledger", b)
    assert figure(alone, "PLD") == figure(both, "PLD")


def test_one_file_twice_is_refused(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "a", 60)
    (tmp_path / "link").symlink_to(path)
    for again in (path, tmp_path / "link"):
        refused(clipwise("epsilon", "--ledger", path, "--ledger", again), "twice")


def test_a_copy_of_a_run_is_refused(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "a", 60)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    refused(clipwise("epsilon", "--ledger", path, "--ledger", tmp_path / "copy"), "copies of one ledger", "last")


@pytest.mark.parametrize(
    "other",
    [replace(EVENT, unit=Unit.USER), replace(EVENT, sampling=Sampling.FIXED_SIZE, adjacency=Adjacency.REPLACE_ONE)],
)
def test_different_guarantees_do_not_add_up(tmp_path: Path, other: Any) -> None:
    a, b = write_ledger(tmp_path / "a", 3), write_ledger(tmp_path / "b", 3, event=other)
    for command in ("epsilon", "tradeoff"):
        refused(clipwise(command, "--ledger", a, "--ledger", b), str(a), str(b), "no single guarantee")


def test_other_data_is_warned_of_and_counted(tmp_path: Path) -> None:
    paths = [write_ledger(tmp_path / f"{n}", 60, header={"dataset_size": n}) for n in (1000, 1001)]
    result = clipwise("epsilon", *(option for path in paths for option in ("--ledger", path)))
    assert "1000, 1001 records" in result.stderr and result.stderr.startswith("warning: ")
    assert figure(result, "PLD") >= epsilon_of(120)


def test_runs_that_joined_are_several_runs(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "ledger", 60)
    single = clipwise("epsilon", "--ledger", path)
    assert "Renyi filter" not in single.stdout and "fixed before" not in single.stdout
    with FileLedger(path, join=True) as ledger:
        ledger.charge(EVENT)
    for command in ("epsilon", "tradeoff"):
        result = clipwise(command, "--ledger", path)
        assert "61 releases of 2 runs together" in result.stdout
        assert "hold if all runs were fixed before the first release" in result.stdout
    text = clipwise("statement", path).stdout
    assert "2 runs share this ledger" in text and "renyi-filter" in text
    assert "if all runs were fixed before the first release" in text
