"""The privacy cost of a search, and a search with a small cost that is accounted for.

Each run of a search is private. Selecting one of many runs costs more than one run, because the choice depends on the
records through all of them.

*All runs released.* Runs on the same records compose, if the settings that decide privacy (noise, rate, steps) were
fixed in advance and each score is part of the releases. Scores of private records without noise give no guarantee.

*Only the best released.* With a random, secret number of runs and independently drawn settings, the best run costs
little more than a single run (Papernot and Steinke, 2022; `accounting.search`). Scores are noised: one validation
record changes the number of right answers by at most 1. Each record is used for training or for validation, never for
both, so the search costs the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipwise import accounting
from clipwise.accounting import Repetitions, from_arguments
from clipwise.accounting.repeat import LARGEST_MEAN
from clipwise.errors import ConfigurationError
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Entry, Sampling, rounded_up
from clipwise.tune.subject import Recipe, Score, Settings, Space, point
from clipwise.validation.arguments import number

_DIGITS = 4
_MOST_KINDS = 8  # with more different runs RDP bounds their composition: PLD would take minutes
_LARGEST = 1e6


def composed_epsilon(scores: Sequence[Score]) -> tuple[float, float] | None:
    """Epsilon and delta of releasing all runs, as if their noise had been fixed in advance; None if unknown."""
    if not scores or any(s.release is None or s.delta is None for s in scores):
        return None
    delta = max(s.delta for s in scores if s.delta is not None)
    history = [
        Entry(from_arguments.event(z, rate, Sampling.POISSON, Adjacency.ZERO_OUT), steps)
        for z, rate, steps in (s.release for s in scores if s.release is not None)
    ]
    kinds = len({entry.event for entry in history})
    return accounting.epsilon_of(history, delta, "pld" if kinds <= _MOST_KINDS else "rdp"), delta


@dataclass(frozen=True)
class SelectionPlan:
    """The noise of a search that is accounted for.

    Attributes:
        epsilon, delta: the guarantee of the whole search, for one record.
        mean: the mean number of runs. The number itself is drawn and stays secret.
        shape: the shape of its distribution; 1 for a geometric one.
        noise_multiplier: the noise multiplier of every run.
        score_noise: the standard deviation of the noise on the number of right answers.
        epsilon_of_a_run: epsilon of one run without a search.
    """

    epsilon: float
    delta: float
    mean: float
    shape: float
    noise_multiplier: float
    score_noise: float
    epsilon_of_a_run: float


def plan(
    epsilon: float, delta: float, *, sample_rate: float, steps: int, mean: float, shape: float = 1.0
) -> SelectionPlan:
    """The noise with which a whole search is (epsilon, delta)-private.

    Args:
        epsilon, delta: the budget of the search.
        sample_rate, steps: of every run. They decide privacy, so all runs share them.
        mean: the mean number of runs, above 1.
        shape: see `accounting.Repetitions`.
    """
    from_arguments.budget(epsilon)
    common: dict[str, Any] = {"mean": mean, "shape": shape, "delta": delta, "adjacency": "zero-out"}
    z = _smallest(
        lambda z: accounting.search(noise_multiplier=z, sample_rate=sample_rate, steps=steps, **common), epsilon
    )
    score = _smallest(lambda z: accounting.search(noise_multiplier=z, steps=1, sampling="full", **common), epsilon)
    alone = accounting.epsilon(noise_multiplier=z, sample_rate=sample_rate, steps=steps, delta=delta)
    return SelectionPlan(epsilon, delta, mean, shape, z, score, alone)


@dataclass(frozen=True)
class SearchResult:
    """The release of a search: the settings of the best run and its noised score, without the number of runs."""

    settings: dict[str, Any]
    noised_accuracy: float
    output: Any


def select(
    plan: SelectionPlan, space: Space, run: Callable[[dict[str, Any]], tuple[int, int, Any]]
) -> SearchResult | None:
    """The best of a secret number of runs, by its noised score; None if no run was drawn.

    Args:
        plan: the noise.
        space: the settings are drawn from it independently for each run. They must not change the cost of a run.
        run: maps settings to the right answers on the validation part, the size of that part, which is public, and
            any other result of the run, such as its weights. It must use `plan.noise_multiplier`.
    """
    random = np.random.default_rng()  # seeded by the operating system, because the number of runs is secret
    key = NoiseKey.fresh()
    best: tuple[float, SearchResult] | None = None
    for _ in range(Repetitions(plan.mean, plan.shape).draw(random)):
        settings = point(space, random.random(len(space)).tolist())
        right, size, output = run(settings)
        noise = float(gaussian(key.derive("score"), 1, plan.score_noise))
        key.advance()
        score = right + noise
        if best is None or score > best[0]:
            best = score, SearchResult(settings, score / size, output)
    key.wipe()
    return None if best is None else best[1]


def planned(
    recipe: Recipe, *, epsilon: float = 3.0, mean_runs: float = 10.0, sample_rate: float = 0.05, epochs: int = 10
) -> tuple[SelectionPlan, Settings]:
    """The plan of a search over a recipe with this budget, and the settings that all of its runs share."""
    from_arguments.budget(epsilon)
    number("mean_runs", mean_runs, above=1, below=LARGEST_MEAN)
    number("sample_rate", sample_rate, above=0, most=1)
    steps = max(1, round(epochs / sample_rate))
    found = plan(epsilon, recipe.delta, sample_rate=sample_rate, steps=steps, mean=mean_runs)
    return found, {"noise_multiplier": found.noise_multiplier, "sample_rate": sample_rate, "epochs": epochs}


def search(recipe: Recipe, plan: SelectionPlan, shared: Settings, seed: int = 0) -> SearchResult | None:
    """Draw a secret number of runs, and release the best."""

    def one(settings: Settings) -> tuple[int, int, object]:
        run = recipe.train({**settings, **shared}, seed)
        return run.right, run.size, run.model

    return select(plan, recipe.free_space, one)


def in_words(plan: SelectionPlan, released: SearchResult | None) -> list[str]:
    """The result of a search in sentences. They do not reveal the number of runs."""
    lines = [
        f"The whole search costs epsilon {rounded_up(plan.epsilon)} at delta {plan.delta:.3g} for one record "
        "(zero-out), if only these lines and the best model are released and the number of runs stays secret. The "
        "duration of the search reveals that number too.",
        f"A single run with this noise (multiplier {plan.noise_multiplier:g}) would cost epsilon "
        f"{rounded_up(plan.epsilon_of_a_run)}; there were {plan.mean:g} runs on average.",
    ]
    if released is None:
        return [*lines, "No run was drawn this time, so there is no result."]
    chosen = ", ".join(f"{name} {value:.3g}" for name, value in released.settings.items())
    return [*lines, f"Best: {chosen}; noised validation accuracy {released.noised_accuracy:.1%}."]


def _smallest(cost: Callable[[float], float], budget: float) -> float:
    low, high = 0.0, 1.0
    while cost(high) > budget:
        low, high = high, 2 * high
        if high > _LARGEST:
            raise ConfigurationError(
                f"epsilon={budget:g} is too small for this search: allow more, or fewer runs on average."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > budget else (low, middle)
    return float(f"{high * (1 + 10.0 ** (1 - _DIGITS)):.{_DIGITS}g}")
