"""Every planted bug is caught by the tools in the table, and no tool raises a false alarm."""

import pytest

from tests.audit.bugs import BUGS

CAUGHT = [(file, tool) for file, bug in BUGS.items() for tool in bug.caught_by]
# Bugs with their own attacked run.
OWN_ATTACK = ("noise_over_batch_size", "missing_root", "shuffled_as_poisson")


@pytest.mark.parametrize(("file", "tool"), CAUGHT, ids=[f"{file}-{tool}" for file, tool in CAUGHT])
def test_a_planted_bug_is_caught(file: str, tool: str) -> None:
    assert BUGS[file].is_caught(tool)


@pytest.mark.parametrize("file", BUGS)
def test_neighbours_passes_where_nothing_is_planted(file: str) -> None:
    assert BUGS[file].is_caught("neighbours", planted=False) is False


@pytest.mark.parametrize("file", OWN_ATTACK)
def test_the_canary_passes_where_nothing_is_planted(file: str) -> None:
    assert BUGS[file].is_caught("canary", planted=False) is False


@pytest.mark.parametrize("file", [file for file, bug in BUGS.items() if bug.deterministic])
def test_a_deterministic_test_passes_where_nothing_is_planted(file: str) -> None:
    assert BUGS[file].is_caught("deterministic test", planted=False) is False


def test_every_bug_is_caught_by_something() -> None:
    assert len(BUGS) == 15
    assert all(bug.caught_by for bug in BUGS.values())
