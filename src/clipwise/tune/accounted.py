"""A search over a named data set with the privacy of the search itself accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipwise.accounting import from_arguments
from clipwise.accounting.repeat import LARGEST_MEAN
from clipwise.errors import ConfigurationError
from clipwise.privacy import Sampling, rounded_up
from clipwise.tune.records import records
from clipwise.tune.selection import Released, SelectionPlan, plan, select
from clipwise.tune.space import Dimension, Range
from clipwise.tune.training import judged, trained
from clipwise.tune.trial import METHODS, Trial, require_bounded
from clipwise.validation.arguments import number, one_of
from experiments.models.lipschitz_blocks import KINDS


@dataclass(frozen=True)
class Found:
    """The plan of a search, and what it released, if it had a run at all."""

    plan: SelectionPlan
    released: Released | None

    def in_words(self) -> list[str]:
        """What may be told. How many runs there were is not among it."""
        p = self.plan
        lines = [
            f"The whole search costs epsilon {rounded_up(p.epsilon)} at delta {p.delta:.3g} for one record (zero-out), "
            "if only what stands here and the best model are shown, and the number of runs stays secret: also how long "
            "it took tells of that number.",
            f"A single run with this noise (multiplier {p.noise_multiplier:g}) would cost epsilon "
            f"{rounded_up(p.epsilon_of_a_run)}; there were {p.mean:g} runs on average.",
        ]
        if self.released is None:
            return [*lines, "This time there was no run, so nothing was found."]
        chosen = ", ".join(f"{name} {value:.3g}" for name, value in self.released.settings.items())
        lines.append(f"Best: {chosen}; noised validation accuracy {self.released.noised_accuracy:.1%}.")
        return lines


def free_space(norm: str) -> dict[str, Dimension]:
    """The part of the paper's table 3 that does not change what a run costs."""
    space: dict[str, Dimension] = {
        "max_norm": Range(1, 15, log=True),
        "learning_rate": Range(1e-4, 1e-2, log=True),
    }
    return space | ({"alpha": Range(0.05, 0.5, log=True)} if norm == "bounded" else {})


def require_possible(method: str, norm: str, epsilon: float, mean_runs: float, sample_rate: float) -> None:
    """Refuse what no search can be planned for, before records are read or a folder is made."""
    if method == "plain":
        raise ConfigurationError("method='plain' has no privacy: use 'dp-sgd', 'lip' or 'fix-lip'.")
    one_of("method", method, METHODS[:-1])
    one_of("norm", norm, KINDS)
    require_bounded(method, norm)
    from_arguments.budget(epsilon)
    number("mean_runs", mean_runs, above=1, below=LARGEST_MEAN)
    from_arguments.event(1.0, sample_rate, Sampling.POISSON)  # of the two only the rate can be refused


def search(
    data: str,
    method: str,
    norm: str,
    folder: Path | None,
    device: torch.device,
    *,
    epsilon: float,
    mean_runs: float,
    sample_rate: float,
    epochs: int,
    seed: int = 0,
) -> Found:
    """Plan the noise, draw a secret number of runs, and release the best.

    Args:
        data, method, norm: as for `Trial`.
        epsilon: of the whole search, at the delta of the data set.
        mean_runs: on average.
        sample_rate, epochs: of every run.
    """
    require_possible(method, norm, epsilon, mean_runs, sample_rate)
    at_hand = records(data, folder, device)
    steps = max(1, round(epochs / sample_rate))
    found = plan(epsilon, at_hand.delta, sample_rate=sample_rate, steps=steps, mean=mean_runs)
    size = len(at_hand.held_out)

    def one(settings: dict[str, Any]) -> tuple[int, int, Any]:
        trial = Trial(
            data,
            method,
            norm,
            noise_multiplier=found.noise_multiplier,
            sample_rate=sample_rate,
            epochs=epochs,
            **settings,
        )
        training = trained(trial, at_hand, seed)
        accuracy, _ = judged(training.model, at_hand.held_out)
        return round(accuracy * size), size, training.model

    return Found(found, select(found, free_space(norm), one))
