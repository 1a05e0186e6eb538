"""Run many faults and report."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from clipwise.ledger import crash_points, ledger
from tests.faults.inject import INJECT, count_lines
from tests.faults.life import Run, first_life, make_visible, second_life
from tests.faults.plan import COMPARED, Plan, plans
from tests.faults.verdict import Facts, broken
from tests.soundness.crash_child import Files, in_a_child, position, saved_position, warm_up

TOO_LONG = 60  # seconds; a process takes about 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults. Returns the exit code: 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of faults that happen")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", type=int, help="run only the fault of this number")
    parser.add_argument("--planted", help="plant this bug in clipwise first: 'late charge' or 'no fsync'")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warm_up()
    began = time.monotonic()
    chosen = enumerate(plans(given.seed))
    if given.only is not None:
        chosen = islice(chosen, given.only, given.only + 1)
    outcomes: list[tuple[Facts, list[str]]] = []
    happened = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number, drawn in chosen:
            plan = replace(drawn, planted=given.planted or "")
            facts = world.facts_of(plan, str(number))
            found = broken(facts)
            outcomes.append((facts, found))
            happened += facts.happened
            for promise in found:
                print(f"BROKEN --only {number}: {plan}: {promise}", flush=True)
            if given.only is not None:
                print("\n".join([*facts.said, "--", *facts.said_after]))
            if happened == given.count:
                break
    report(outcomes, time.monotonic() - began)
    return int(any(found for _, found in outcomes))


class World:
    """Runs the processes of each plan."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = self._count_lines()
        self._references: dict[Plan, list[object]] = {}

    def facts_of(self, plan: Plan, name: str) -> Facts:
        """Run both processes of a plan."""
        files = self._files(name)
        end = _in_a_child(files, lambda: first_life(INJECT[plan.kind](plan, files, self._lines)))
        said, at, saved = files.said(), position(files), saved_position(files)
        end_after = _in_a_child(files, lambda: second_life(plan, files))
        return Facts(
            plan=plan,
            end=end,
            said=said,
            position=at,
            checkpoint=saved,
            end_after=end_after,
            said_after=files.said()[len(said) :],
            position_after=position(files),
            is_clean_after=ledger.read(files.ledger).clean,
            reference=self._reference(plan) if plan.kind in COMPARED else None,
        )

    def _reference(self, plan: Plan) -> list[object]:
        """Return the weights of such a run without a fault. (Physical batches do not change them.)"""
        key = replace(plan, at="none", turn=0, share=0.0, block=1)
        if key not in self._references:
            files = self._files(f"reference {len(self._references)}")
            _in_a_child(files, lambda: first_life(_undisturbed(key, files)))
            weights = [line for line in files.said() if line.startswith("weights ")]
            self._references[key] = json.loads(weights[-1][8:])
        return self._references[key]

    def _count_lines(self) -> int:
        """Return the number of lines at which a run can be interrupted."""
        files = self._files("lines")
        plan = Plan("kill", "line", 0)
        _in_a_child(files, lambda: files.say(f"lines {count_lines(plan, files)}"))
        return int(files.said()[-1].split()[1])

    def _files(self, name: str) -> Files:
        (self._folder / name).mkdir()
        return Files(self._folder / name)


def _in_a_child(files: Files, life: Callable[[], object]) -> int:
    def lives(*_: object) -> None:
        signal.alarm(TOO_LONG)  # a run that hangs ends by this signal
        life()

    return in_a_child(lives, {}, files)


def _undisturbed(plan: Plan, files: Files) -> Run:
    crash_points.reached = make_visible(files)
    return Run(plan, files)


def report(outcomes: Sequence[tuple[Facts, list[str]]], seconds: float) -> None:
    """Print the number of faults of each kind and their outcomes."""
    happened = [facts for facts, _ in outcomes if facts.happened]
    print(f"{len(happened)} faults happened in {len(outcomes)} runs, {seconds:.0f} s")
    print(f"{'kind':<20}{'place':<28}{'faults':>8}{'broken':>8}")
    kinds: Counter[tuple[str, str]] = Counter((f.plan.kind, f.plan.at) for f in happened)
    wrong: Counter[tuple[str, str]] = Counter((f.plan.kind, f.plan.at) for f, found in outcomes if found)
    for kind, at in sorted({*kinds, *wrong}):
        print(f"{kind:<20}{at:<28}{kinds[kind, at]:>8}{wrong[kind, at]:>8}")
    overstated = Counter(facts.position - facts.seen for facts in happened)
    print("overstated by (releases: runs):", ", ".join(f"{n}: {c}" for n, c in sorted(overstated.items())))
    print(f"broken promises: {sum(len(found) for _, found in outcomes)}", file=sys.stdout)
