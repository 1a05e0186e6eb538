"""Run many cases and report the outcomes."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tests.api_fuzz import damaged_files, figures, runs
from tests.api_fuzz.outcome import Outcome, played
from tests.api_fuzz.values import Choice

GAMES: dict[str, tuple[Callable[[Choice], list[str]], int]] = {
    "run": (runs.play, 70),
    "figure": (figures.play, 12),
    "ledger": (damaged_files.damaged_ledger, 8),
    "checkpoint": (damaged_files.damaged_checkpoint, 4),
    "check": (damaged_files.checked, 6),
}


def game_of(seed: int) -> str:
    """Return the part of the API that the case of a seed tests."""
    return random.Random(seed).choices(list(GAMES), [weight for _, weight in GAMES.values()])[0]


def case(seed: int) -> Outcome:
    """Run the case of a seed, independent of earlier cases."""
    name, dice = game_of(seed), random.Random(f"case {seed}")
    choice = Choice(dice, odds=dice.choice((0.0, 0.02, 0.1)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return played(name, seed, GAMES[name][0], choice)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer. Returns the exit code: 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.api_fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; the others count up")
    parser.add_argument("--only", type=int, help="run only the case of this seed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    outcomes = []
    for seed in [given.only] if given.only is not None else range(given.seed, given.seed + given.cases):
        outcomes.append(case(seed))
        if outcomes[-1].problem:
            print(f"WRONG --only {seed} ({outcomes[-1].game}): {outcomes[-1].problem}", flush=True)
    report(outcomes, time.monotonic() - began)
    return int(any(outcome.problem for outcome in outcomes))


def report(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Print the number of cases of each game and their outcomes."""
    print(f"{len(outcomes)} cases, {seconds:.0f} s")
    print(f"{'game':<14}{'cases':>8}{'refused':>9}{'wrong':>8}")
    for game in GAMES:
        mine = [o for o in outcomes if o.game == game]
        refused, wrong = sum(bool(o.refusals) for o in mine), sum(bool(o.problem) for o in mine)
        print(f"{game:<14}{len(mine):>8}{refused:>9}{wrong:>8}")
    refusals = Counter(name for o in outcomes for name in o.refusals)
    print("refusals:", ", ".join(f"{name} {count}" for name, count in refusals.most_common()))
    taken = Counter(f"{name}={value!r}"[:40] for o in outcomes for name, value in o.accepted.items())
    print("awkward arguments that were taken:", ", ".join(f"{text} ({n})" for text, n in taken.most_common(40)))
