"""After every fault the ledger does not understate, the checkpoint is complete, and the run can continue."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import clipwise
from tests.faults.plan import KINDS, Plan, plans
from tests.faults.verdict import Facts, broken

COUNT, MANY = 30, 300  # `make faults` tries 1,000


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a fresh process that can fork others."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "tests.faults", *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(clipwise.__file__).parents[1])},
        timeout=300,
        check=False,
    )


def test_no_fault_breaks_a_promise() -> None:
    done = command("--count", str(COUNT), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} faults happened" in done.stdout


def test_every_kind_of_fault_comes_up_and_follows_from_the_seed() -> None:
    first, again, other = (list(islice(plans(seed), COUNT)) for seed in (1, 1, 2))
    assert {plan.kind for plan in first} == set(KINDS)
    assert first == again != other


PLAN = Plan("ctrl-c", "step.before-grad", 1)
WELL = Facts(PLAN, 0, ["opened 0", "fault", "release"], 1, None, 0, ["opened 1", *["update"] * 4], 5)


def changed(**facts: object) -> list[str]:
    return broken(Facts(**{**vars(WELL), **facts}))  # type: ignore[arg-type]


def test_a_run_without_a_fault_keeps_every_property() -> None:
    assert broken(WELL) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"position": 0}, "the ledger counts 0"),
        ({"checkpoint": 2, "said": ["saved 2", "release"]}, "more releases than the ledger"),
        ({"checkpoint": 1, "said": ["release"]}, "neither the old one nor the new one"),
        ({"said": ["key a 1", "key a 2"]}, "same noise on two sums"),
        ({"said": ["error ValueError()"]}, "ValueError"),
        ({"end": 1}, "first process ended"),
        ({"end_after": -14}, "second process ended"),
        ({"said_after": ["opened 0", *["update"] * 4], "position_after": 4}, "shrunk"),
        ({"position_after": 4}, "count each of them once"),
        ({"is_clean_after": False}, "cleanly"),
        ({"plan": Plan("clock jump", "step.before-grad", 1)}, "did not live through it"),
    ],
)
def test_a_broken_property_is_detected(facts: dict[str, object], words: str) -> None:
    assert any(words in promise for promise in changed(**facts))


def test_a_ledger_that_is_charged_too_late_is_found() -> None:
    """The plan is a kill in the middle of a step; the planted bug charges after the step."""
    numbers = [
        number
        for number, plan in enumerate(islice(plans(1), MANY))
        if (plan.kind, plan.at) == ("kill", "step.before-grad") and not plan.is_compiled and plan.block == 1
    ]
    done = command("--seed", "1", "--planted", "late charge", "--only", str(numbers[0]))
    assert done.returncode == 1 and "releases were seen" in done.stdout, done.stdout + done.stderr
