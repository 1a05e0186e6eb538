"""Tune a named data set over the paper's search space (table 3), as `clipwise tune` does for a recipe.

python -m experiments lip-dp-sgd/tune adult --method lip --data DIR --trials 60 --out runs/adult
python -m experiments lip-dp-sgd/tune digits --accounted --epsilon 3 --mean-runs 10
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clipwise.cli.tune import require_no_options_of_accounted, search_accounted, search_openly
from clipwise.tune import Choice, Range, Recipe, Run
from clipwise.tune.subject import Dimension, Settings
from clipwise.validation.arguments import one_of
from experiments.harness.command import parser_of
from experiments.harness.environment import device_of
from experiments.lip_dp_sgd.sets import names, records
from experiments.lip_dp_sgd.training import begun, judged, rate_of
from experiments.lip_dp_sgd.trial import METHODS, Trial, require_bounded
from experiments.models.lipschitz_networks import KINDS


def paper_space(norm: str = "none", group_size: int = 2) -> dict[str, Dimension]:
    """Table 3 of Barczewski and Ramon (2024). It has no number of epochs; that list is ours.

    Args:
        norm: "bounded" adds the groups and the lower limit alpha of the norm.
        group_size: the size of a group: alpha goes from 0.1 / size to 1 / size.
    """
    space: dict[str, Dimension] = {
        "noise_multiplier": Range(0.4, 5, log=True),
        "max_norm": Range(1, 15, log=True),
        "batch_size": Range(32, 512, log=True, whole=True),
        "learning_rate": Range(1e-4, 1e-2, log=True),
        "epochs": Choice((5, 10, 20, 40)),
    }
    if norm == "bounded":
        space["groups"] = Choice((8, 16, 32))
        space["alpha"] = Range(0.1 / group_size, 1 / group_size, log=True)
    return space


def recipe(data: str, method: str, norm: str, folder: Path | None, device: torch.device) -> Recipe:
    """A data set by name over `paper_space`, evaluated on a validation part."""
    one_of("data", data, names())
    one_of("method", method, METHODS[:-1])
    one_of("norm", norm, KINDS)
    require_bounded(method, norm)
    at_hand = records(data, folder, device)
    size = len(at_hand.held_out)

    def train(settings: Settings, seed: int) -> Run:
        trial = Trial(data, method, norm, **settings)
        training = begun(trial, at_hand, seed).all_steps()
        right = round(judged(training.model, at_hand.held_out)[0] * size)
        cost = training.cost()
        release = (cost["noise_multiplier"], rate_of(trial, len(at_hand.train)), training.steps)
        return Run(right, size, training.model, cost["epsilon"], release)

    return Recipe(f"{data}/{norm}/{method}", paper_space(norm), at_hand.delta, train)


def main(arguments: Sequence[str]) -> None:
    """Search; print and write the results."""
    parser = parser_of("python -m experiments lip-dp-sgd/tune", __doc__)
    parser.add_argument("name", help=f"a data set: {', '.join(names())}")
    parser.add_argument("--method", default="dp-sgd", help="dp-sgd, lip or fix-lip")
    parser.add_argument("--norm", default="none", help="none, group, or bounded: group norm with a lower limit")
    parser.add_argument("--data", type=Path, help="folder of data sets; if left out, CLIPWISE_DATA names it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--trials", type=int, help="finished runs that the study shall have; 30 if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the search and of first weights, not of noise")
    parser.add_argument("--accounted", action="store_true", help="account for the privacy of the search")
    parser.add_argument("--epsilon", type=float, help="with --accounted: of the whole search; 3 if left out")
    parser.add_argument("--mean-runs", type=float, help="with --accounted: runs on average; 10 if left out")
    parser.add_argument("--sample-rate", type=float, help="with --accounted: of every run; 0.05 if left out")
    parser.add_argument("--epochs", type=int, help="with --accounted: of every run; 10 if left out")
    parser.add_argument("--out", type=Path, help="folder of the study")
    asked = parser.parse_args(arguments)
    found = recipe(asked.name, asked.method, asked.norm, asked.data, device_of(asked.device))
    named = ("epsilon", "mean_runs", "sample_rate", "epochs")
    given: dict[str, Any] = {n: getattr(asked, n) for n in named if getattr(asked, n) is not None}
    if asked.accounted:
        search_accounted(found, given, asked.trials, asked.out, asked.seed)
    else:
        require_no_options_of_accounted(given)
        search_openly(found.subject(asked.seed), asked.trials, asked.out, asked.seed)
