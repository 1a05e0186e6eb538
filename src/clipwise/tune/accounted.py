"""A search over a recipe with the privacy of the search itself accounted for."""

from __future__ import annotations

from dataclasses import dataclass

from clipwise.accounting import arguments
from clipwise.accounting.repeat import LARGEST_MEAN
from clipwise.privacy import Sampling, rounded_up
from clipwise.tune.selection import Released, SelectionPlan, plan, select
from clipwise.tune.subject import Recipe, Settings


@dataclass(frozen=True)
class Options:
    """Of an accounted search.

    Attributes:
        epsilon: of the whole search, at the delta of the recipe.
        mean_runs: runs on average.
        sample_rate, epochs: of every run.
    """

    epsilon: float = 3.0
    mean_runs: float = 10.0
    sample_rate: float = 0.05
    epochs: int = 10

    def __post_init__(self) -> None:
        arguments.budget(self.epsilon)
        arguments.number("mean_runs", self.mean_runs, above=1, below=LARGEST_MEAN)
        arguments.event(1.0, self.sample_rate, Sampling.POISSON)  # of the two only the rate can be refused


@dataclass(frozen=True)
class Found:
    """The plan of a search, and the best run, if there was one."""

    plan: SelectionPlan
    released: Released | None

    def in_words(self) -> list[str]:
        """What may be shown. The number of runs may not."""
        p = self.plan
        lines = [
            f"The whole search costs epsilon {rounded_up(p.epsilon)} at delta {p.delta:.3g} for one record (zero-out), "
            "if only these lines and the best model are shown and the number of runs stays secret. The duration of "
            "the search reveals that number too.",
            f"A single run with this noise (multiplier {p.noise_multiplier:g}) would cost epsilon "
            f"{rounded_up(p.epsilon_of_a_run)}; there were {p.mean:g} runs on average.",
        ]
        if self.released is None:
            return [*lines, "This time there was no run, so nothing was found."]
        chosen = ", ".join(f"{name} {value:.3g}" for name, value in self.released.settings.items())
        lines.append(f"Best: {chosen}; noised validation accuracy {self.released.noised_accuracy:.1%}.")
        return lines


def search(recipe: Recipe, options: Options, seed: int = 0) -> Found:
    """Plan the noise, draw a secret number of runs, and release the best."""
    steps = max(1, round(options.epochs / options.sample_rate))
    found = plan(
        options.epsilon, recipe.delta, sample_rate=options.sample_rate, steps=steps, mean=options.mean_runs
    )
    fixed = {
        "noise_multiplier": found.noise_multiplier,
        "sample_rate": options.sample_rate,
        "epochs": options.epochs,
    }

    def one(settings: Settings) -> tuple[int, int, object]:
        run = recipe.train({**settings, **fixed}, seed)
        return run.right, run.size, run.model

    return Found(found, select(found, recipe.free_space, one))
