"""`clipwise noise`: how much noise a budget asks for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from clipwise import accounting
from clipwise.commands import plan
from clipwise.commands.output import in_words, rounded_up, say, stdout
from clipwise.privacy import Sampling


def noise(
    epsilon: Annotated[float, typer.Option(help="The privacy budget: what the whole run may cost.")],
    sample_rate: plan.SampleRate = None,
    batch_size: plan.BatchSize = None,
    dataset_size: plan.DatasetSize = None,
    steps: plan.Steps = None,
    epochs: plan.Epochs = None,
    delta: plan.Delta = 1e-5,
    sampling: plan.HowSampled = Sampling.POISSON,
    adjacency: plan.Neighbours = None,
) -> None:
    """The smallest noise multiplier that keeps a run within a budget.

    For example:

        clipwise noise --epsilon 3 --batch-size 256 --dataset-size 60000 --epochs 20

    The noise multiplier is the standard deviation of the noise over the sensitivity of the clipped sum. With
    clipping at norm C and Poisson sampling, each coordinate of the sum gets noise of that times C. The
    answer is checked with the PLD accountant; `make_private(epsilon=...)` asks the same question.
    """
    run = plan.plan_of(
        sampling=sampling,
        adjacency=adjacency,
        sample_rate=sample_rate,
        batch_size=batch_size,
        dataset_size=dataset_size,
        steps=steps,
        epochs=epochs,
        delta=delta,
    )
    multiplier = rounded_up(accounting.noise_multiplier(epsilon=epsilon, delta=delta, **run.arguments()), 6)
    reached = accounting.epsilon(noise_multiplier=float(multiplier), delta=delta, **run.arguments())
    table = Table("noise multiplier", f"epsilon at delta {delta:g}")
    table.add_row(multiplier, f"{rounded_up(reached)} (PLD)", style="bold")
    say(str(run))
    stdout().print(table)
    say(in_words(reached, delta, run.adjacency))
