"""Run many random loops and report."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.user_loops.world import World, silently

# Relative frequencies: mostly private steps, since a refusal ends a sequence.
ACTIONS = {
    "private_step": 8,
    "backward_and_step": 3,
    "backward_only": 1,
    "plain_step": 1,
    "plain_step_through_data": 1,
    "second_optimizer": 1,
    "update_in_the_middle": 1,
    "evaluate": 2,
    "evaluate_in_train_mode": 1,
    "evaluate_averages": 2,
    "schedule": 2,
    "save": 2,
    "load": 2,
    "freeze": 1,
    "fail": 1,
    "cast": 1,
    "declare": 1,
    "reopen": 1,
    "second_run": 1,
}
_LONGEST = 10


@dataclass(frozen=True)
class Outcome:
    """The outcome of one sequence."""

    seed: int
    actions: tuple[str, ...]
    refusals: int
    releases: int
    problems: tuple[str, ...]


def sequence(seed: int, folder: Path) -> Outcome:
    """One random loop."""
    world = World(seed, folder)
    chosen = world.random.choices(list(ACTIONS), list(ACTIONS.values()), k=world.random.randint(2, _LONGEST))
    for action in chosen:
        with world.refusing():
            silently(getattr(world, action))
        if world.random.random() < 0.2:
            silently(world.judge)
    silently(world.end)
    return Outcome(seed, tuple(chosen), world.refusals, world.truth.releases, tuple(world.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sequences. Returns the exit code: 1 if a statement was better than the truth."""
    parser = argparse.ArgumentParser(prog="python -m tests.user_loops", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many sequences")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first sequence")
    parser.add_argument("--only", type=int, help="run only the sequence of this seed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = range(given.seed, given.seed + given.count) if given.only is None else [given.only]
    began, failed, played, refused = time.monotonic(), 0, Counter[str](), 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcome = sequence(seed, Path(folder))
        played.update(outcome.actions)
        refused += bool(outcome.refusals)
        failed += bool(outcome.problems)
        for problem in dict.fromkeys(outcome.problems):
            print(f"BROKEN --only {seed}: {problem}: {' '.join(outcome.actions)}", flush=True)
    print(
        f"{len(seeds)} sequences in {time.monotonic() - began:.0f} s: {refused} were refused somewhere, {failed} broken"
    )
    print(", ".join(f"{action} {played[action]}" for action in ACTIONS))
    return int(failed > 0)
