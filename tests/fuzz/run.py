"""Run many random models and report their coverage."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence

from clipwise.gradients import registered
from tests.fuzz.check import Outcome, check
from tests.fuzz.models import all_traits
from tests.soundness.test_complete import EXEMPT

ENOUGH_MODELS = 2000  # from here on a run must cover everything
LEAST_OF_A_RULE, LEAST_OF_A_TRAIT = 50, 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer. Returns the exit code: 1 on a mismatch or too little coverage."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--models", type=int, default=ENOUGH_MODELS, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first model; the others count up")
    parser.add_argument("--only", type=int, help="run only the model of this seed")
    given = parser.parse_args(arguments)
    seeds = range(given.seed, given.seed + given.models) if given.only is None else [given.only]
    outcomes = []
    for seed in seeds:
        outcomes.append(check(seed))
        if outcomes[-1].problem:
            print(f"MISMATCH --only {seed}: {outcomes[-1].problem}", flush=True)
    if given.only is not None:
        print("traits:", ", ".join(sorted(outcomes[0].traits)))
    rare = report(outcomes)
    wrong = [o.seed for o in outcomes if o.problem]
    if wrong:
        print(f"\n{len(wrong)} mismatches, seeds {', '.join(map(str, wrong))}")
    if rare and len(outcomes) >= ENOUGH_MODELS:
        print("\nSeen too rarely:", ", ".join(rare))
    return int(bool(wrong) or (bool(rare) and len(outcomes) >= ENOUGH_MODELS))


def report(outcomes: Sequence[Outcome]) -> list[str]:
    """Print the coverage. Returns what occurred too rarely."""
    rules = Counter({name: 0 for name in registered() if name not in EXEMPT})
    traits = Counter(dict.fromkeys(all_traits(), 0))
    fallbacks: Counter[str] = Counter()
    methods: Counter[str] = Counter()
    for outcome in outcomes:
        rules.update(outcome.rules)
        traits.update(outcome.traits)
        fallbacks.update(outcome.fallbacks)
        methods[outcome.method] += 1
    refused = sum(outcome.refused for outcome in outcomes)
    print(f"{len(outcomes)} models, of which {refused} were refused")
    _table("models with the rule", rules.items())
    _table("models with the trait", traits.items())
    _table("models with the method", methods.items())
    _table("models that reached the fallback at", fallbacks.items())
    return [name for name, n in rules.items() if n < LEAST_OF_A_RULE] + [
        name for name, n in traits.items() if n < LEAST_OF_A_TRAIT
    ]


def _table(title: str, counts: Iterable[tuple[str, int]]) -> None:
    print(f"\n{title}")
    for name, n in sorted(counts, key=lambda entry: (-entry[1], entry[0])):
        print(f"{n:7d}  {name}")
