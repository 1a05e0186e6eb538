"""Each planted mistake of a user is caught, and docs/concepts/audit.md has the table."""

from pathlib import Path

import pytest

from tests.audit.habits import HABITS, HEAD, OTHERS, PAGE, PLACE, Habit, rows


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.plant.__name__)
def test_a_mistake_is_caught(habit: Habit, tmp_path: Path) -> None:
    assert habit.plant(tmp_path)


def test_the_page_has_the_table() -> None:
    found = PLACE.search(PAGE.read_text())
    assert found and found[0] == found[1] + HEAD + rows() + found[2]
    for tested in [habit.tested for habit in HABITS] + [tested for *_, tested in OTHERS]:
        assert (PAGE.parents[2] / tested).is_file()
    assert {habit.item for habit in HABITS} | {item for item, *_ in OTHERS} == set(range(1, 18))
