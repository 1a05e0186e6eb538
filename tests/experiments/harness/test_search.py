"""Two rounds of trials, and which of them is the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.harness.search import NEAR, Asked, Rounds, nearby, trial_key, winner


@dataclass(frozen=True)
class Trial:
    key: str
    epochs: int = 3


FIRST = (Trial("a"), Trial("b"), Trial("c"))
ROUNDS: Rounds[Any] = Rounds(FIRST, lambda best: (Trial(f"near {best}"),))


def results(**accuracies: float) -> dict[str, dict[str, float]]:
    return {trial_key(Trial(name)): {"accuracy": a, "loss": 1.0} for name, a in accuracies.items()}


def test_the_second_round_waits_for_all_of_the_first() -> None:
    assert ROUNDS.begun(results(a=0.1, b=0.2)) == FIRST
    assert ROUNDS.begun(results(a=0.1, b=0.2, c=0.1)) == (*FIRST, Trial("near 1"))


def test_the_best_waits_for_the_second_round() -> None:
    found = results(a=0.1, b=0.2, c=0.1)
    assert ROUNDS.best(found) is None
    assert ROUNDS.best({**found, **results(**{"near 1": 0.1})}) == Trial("b")
    assert ROUNDS.best({**found, **results(**{"near 1": 0.3})}) == Trial("near 1")


def test_a_trial_that_is_not_finished_is_missing_and_one_that_failed_is_not() -> None:
    found: dict[str, Any] = results(a=0.1, b=0.2)
    assert winner(FIRST, {**found, trial_key(FIRST[2]): {"unfinished": True}}) is None
    assert winner(FIRST, {**found, trial_key(FIRST[2]): {"failed": "out of memory"}}) == Trial("b")
    assert winner(FIRST[:1], {trial_key(FIRST[0]): {"failed": "out of memory"}}) is None


def test_of_equals_the_smaller_loss_and_then_the_first() -> None:
    found: dict[str, Any] = results(a=0.2, b=0.2, c=0.2)
    assert winner(FIRST, found) == Trial("a")
    found[trial_key(FIRST[2])]["loss"] = 0.5
    assert winner(FIRST, found) == Trial("c")


def test_a_requested_run_becomes_a_task_with_its_place() -> None:
    asked = Asked(Trial("a"), 2, "test", "5", "row", 1.0)
    task = asked.task(quick=True)
    assert task.key == asked.key == "test a seed=2"
    assert task.place.to_dict() == {"figure": "5", "row": "row", "epochs_asked": 3, "quick": True, "budget": 1.0}


UNIT = st.floats(0, 1)


@given(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=5))
def test_nearby_points_are_near_and_in_the_cube(pairs: list[tuple[float, float]]) -> None:
    centre, away = zip(*pairs, strict=True)
    for c, u in zip(centre, nearby(centre, away), strict=True):
        assert 0 <= u <= 1 and abs(u - c) <= NEAR + 1e-12


def test_the_middle_is_the_centre_itself() -> None:
    assert nearby([0.3, 0.9], [0.5, 0.5]) == pytest.approx([0.3, 0.9])
