"""After a crash at any point the ledger holds at least all visible releases, and the run can continue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clipwise
from clipwise.ledger import crash_points

CHILD = Path(__file__).with_name("crash_child.py")
STEPS, STEPS_AFTER = 12, 4

Plan = dict[str, Any]


def plans() -> list[Plan]:
    """Every point, early and late; blocks of one and of many releases; killed, and with a power cut."""
    blocks_of_1, doubling = {"block": 1}, {"block": 64}  # the latter reserve 1, 2, 4, 4 and 4 releases
    places: list[tuple[str, dict[str, int], list[int]]] = [
        ("ledger.before-fsync", blocks_of_1, [1, 2, 5, 7, 12]),
        ("ledger.before-fsync", doubling, [1, 2, 3, 4]),
        ("ledger.after-fsync", blocks_of_1, [1, 2, 5, 7, 12]),
        ("ledger.after-fsync", doubling, [1, 2, 3, 4]),
        ("step.before-grad", doubling, [1, 2, 4, 7, 8, 12]),
        ("step.before-grad", blocks_of_1, [3, 11]),
        ("step.before-update", doubling, [1, 2, 4, 7, 8, 12]),
        ("step.before-update", blocks_of_1, [3, 11]),
        ("step.during-update", doubling, [1, 2, 3, 6, 9, 12]),
        ("step.during-update", blocks_of_1, [4, 10]),
        ("checkpoint.during-write", doubling, [1, 2, 3, 4, 5]),  # the fifth is the resume file, in close()
        ("checkpoint.during-write", blocks_of_1, [1, 4, 5]),
    ]
    found = [{"point": point, "n": n, **block} for point, block, hits in places for n in hits]
    for number, plan in enumerate(found):
        plan["sampling"] = ("poisson", "shuffled")[number % 2]
        plan["power_cut"] = (None, 0.0, 0.5, 0.98)[number % 4]
    return found


PLANTED: list[Plan] = [
    {"planted": "late charge", "point": "ledger.before-fsync", "n": 3, "power_cut": 0.0},
    {"planted": "no fsync", "point": "step.before-update", "n": 3, "power_cut": 0.0},
]
PLANTED = [{**plan, "block": 1, "sampling": "poisson"} for plan in PLANTED]


def run(plans: list[Plan], folder: Path) -> list[dict[str, Any]]:
    source = str(Path(clipwise.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder)],
        input=json.dumps(plans),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: list[dict[str, Any]] = json.loads(done.stdout)
    return facts


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(plans() + PLANTED, tmp_path_factory.mktemp("crash"))


@pytest.fixture(scope="module")
def sound(deaths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [facts for facts in deaths if "planted" not in facts]


def seen(facts: dict[str, Any]) -> int:
    """Return the number of visible releases."""
    return max(facts["said"].count("release"), facts["said"].count("seen"))


def understates(facts: dict[str, Any]) -> bool:
    return bool(facts["position"] < seen(facts))


def test_every_point_is_tried_often_enough(sound: list[dict[str, Any]]) -> None:
    assert len(sound) >= 50
    for point in crash_points.POINTS:
        assert len({facts["n"] for facts in sound if facts["point"] == point}) >= 3
    for facts in sound:
        assert facts["end"] == -signal.SIGKILL, facts
        hits = {"step.before-grad": "release", "step.before-update": "seen", "step.during-update": "seen"}
        if facts["point"] in hits:  # it was killed at the planned point
            assert facts["said"].count(hits[facts["point"]]) == facts["n"]


def test_the_ledger_never_understates(sound: list[dict[str, Any]]) -> None:
    assert [facts for facts in sound if understates(facts)] == []


def test_the_ledger_overstates_by_less_than_a_block_and_a_torn_line(sound: list[dict[str, Any]]) -> None:
    for facts in sound:
        most = min(facts["block"], 4)
        torn = most if facts["point"] == "ledger.before-fsync" and facts["power_cut"] else 0
        assert facts["position"] <= seen(facts) + most + torn, facts


def test_a_run_can_continue_after_a_crash(sound: list[dict[str, Any]]) -> None:
    for facts in sound:
        assert facts["second_end"] == 0, facts["said_after"]
        (opened,) = [int(line.split()[1]) for line in facts["said_after"] if line.startswith("opened")]
        assert facts["position"] <= opened, "the position has shrunk"
        assert facts["said_after"].count("update") == STEPS_AFTER
        assert facts["final_position"] == opened + STEPS_AFTER
        assert facts["clean"]


def test_a_checkpoint_is_the_old_one_or_the_new_one(sound: list[dict[str, Any]]) -> None:
    for facts in sound:
        saved = [int(line.split()[1]) for line in facts["said"] if line.startswith("saved")]
        saving = [int(line.split()[1]) for line in facts["said"] if line.startswith("saving")]
        assert facts["checkpoint"] in {saved[-1] if saved else None, saving[-1] if saving else None}, facts
    assert any(facts["checkpoint"] is None for facts in sound)
    assert any(facts["point"] == "checkpoint.during-write" and facts["checkpoint"] for facts in sound)


@pytest.mark.parametrize("fault", ["late charge", "no fsync"])
def test_a_planted_fault_is_found(deaths: list[dict[str, Any]], fault: str) -> None:
    (facts,) = [facts for facts in deaths if facts.get("planted") == fault]
    assert facts["end"] == -signal.SIGKILL, facts
    assert understates(facts), facts
