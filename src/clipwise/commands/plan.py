"""A run as options describe it: how batches are drawn, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from clipwise.arguments import adjacency_of, delta_of, planned_steps
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Sampling
from clipwise.sampling import make_scheme

SampleRate = Annotated[
    float | None,
    typer.Option(help="The chance that a given record is in a batch, between 0 and 1."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="The (expected) number of records in a batch; goes with --dataset-size."),
]
DatasetSize = Annotated[
    int | None,
    typer.Option(help="The number of records in the data set, which is public."),
]
Steps = Annotated[int | None, typer.Option(help="The number of batches to train on.")]
Epochs = Annotated[
    float | None,
    typer.Option(help="In place of --steps: how often the data set is gone through."),
]
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta); choose it well below 1/records.")]
HowSampled = Annotated[
    Sampling,
    typer.Option("--sampling", help="How batches are drawn. An ordinary shuffled loader is 'shuffled'."),
]
Neighbours = Annotated[
    Adjacency | None,
    typer.Option(
        "--adjacency", help="Which data sets shall look alike; by default what the sampling goes with."
    ),
]


@dataclass(frozen=True)
class Plan:
    """What an accountant needs to know of a run, besides noise and budget."""

    sampling: Sampling
    adjacency: Adjacency
    sample_rate: float
    period: int
    steps: int

    def arguments(self) -> dict[str, Any]:
        """As the functions of `clipwise.accounting` take it."""
        return {
            "sampling": str(self.sampling),
            "adjacency": str(self.adjacency),
            "sample_rate": self.sample_rate,
            "period": self.period,
            "steps": self.steps,
        }

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.sampling} sampling at rate {self.sample_rate:.6g}, {self.adjacency}"
        )


def plan_of(
    *,
    sampling: Sampling,
    adjacency: Adjacency | None,
    sample_rate: float | None,
    batch_size: int | None,
    dataset_size: int | None,
    steps: int | None,
    epochs: float | None,
    delta: float,
) -> Plan:
    """Make the options definite, by the same rules as `make_private`, or refuse them."""
    if dataset_size is None and batch_size is not None:
        raise ConfigurationError(
            "--batch-size needs --dataset-size: what counts is the rate between the two."
        )
    if sampling is not Sampling.FULL and sample_rate is None and batch_size is None:
        raise ConfigurationError("Give --sample-rate, or --batch-size and --dataset-size.")
    if steps is None and epochs is None:
        raise ConfigurationError("Give --steps or --epochs: every step costs privacy.")
    if dataset_size is not None:
        delta_of(delta, None, dataset_size)  # for its warning: delta may be too large for so many records
    # A rate alone is enough for the cost: the number of records then plays no part.
    scheme = make_scheme(sampling, 1 if dataset_size is None else dataset_size, batch_size, sample_rate)
    planned = planned_steps(epochs, steps, scheme)
    assert planned is not None  # one of the two was given
    return Plan(
        sampling=scheme.sampling,
        adjacency=adjacency_of(adjacency, scheme.sampling),
        sample_rate=scheme.sample_rate,
        period=scheme.period,
        steps=planned,
    )
