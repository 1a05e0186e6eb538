"""A run as options describe it: how batches are drawn, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from clipwise.accounting.from_arguments import MOST_STEPS
from clipwise.cli.naming import naming_options
from clipwise.engine.plan import adjacency_of, delta_of, planned_steps
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Sampling, Unit
from clipwise.sampling import Scheme, TruncatedPoisson, make_scheme

NoiseMultiplier = Annotated[
    float | None,
    typer.Option(help="Standard deviation of the noise over the sensitivity of the clipped sum."),
]
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
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        help="For truncated-poisson: the most records in a batch; by default so many that it costs nothing."
    ),
]
MiniSets = Annotated[
    int | None,
    typer.Option(help="For partition and fixed-size: how many mini-sets make a batch; 1 by default."),
]
Steps = Annotated[int | None, typer.Option(help="The number of batches to train on.")]
Epochs = Annotated[
    float | None,
    typer.Option(help="In place of --steps: how often the data set is gone through."),
]
Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta); choose it well below 1/records.")]
HowSampled = Annotated[
    Sampling,
    typer.Option(
        "--sampling",
        help="How batches are drawn. An ordinary shuffled loader is 'shuffled'. 'partition' is for Batch, which clips "
        "each block as a whole: for any other clipping the figure would be too low.",
    ),
]
Neighbours = Annotated[
    Adjacency | None,
    typer.Option(
        "--adjacency", help="Which data sets shall look alike; by default what the sampling goes with."
    ),
]
Protected = Annotated[Unit, typer.Option("--unit", help="What one item of the data set stands for.")]


@dataclass(frozen=True)
class Asked:
    """The options of a planned run, as they were given. None is "left out"."""

    sampling: Sampling = Sampling.POISSON
    adjacency: Adjacency | None = None
    unit: Unit = Unit.RECORD
    sample_rate: float | None = None
    batch_size: int | None = None
    dataset_size: int | None = None
    max_batch_size: int | None = None
    mini_sets: int | None = None
    steps: int | None = None
    epochs: float | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether all of it was left out."""
        return self == Asked()

    @property
    def has_rate(self) -> bool:
        """Whether it says how large a batch is."""
        return self.sampling is Sampling.FULL or self.sample_rate is not None or self.batch_size is not None

    @property
    def has_length(self) -> bool:
        """Whether it says how long the run is."""
        return self.steps is not None or self.epochs is not None


@dataclass(frozen=True)
class Plan:
    """A run that is definite but for its noise."""

    scheme: Scheme
    adjacency: Adjacency
    unit: Unit
    steps: int

    def history(self, noise_multiplier: float) -> list[Entry]:
        """The releases of the run with that much noise."""
        return [Entry(self.scheme.event(noise_multiplier, self.adjacency, self.unit), self.steps)]

    def arguments(self) -> dict[str, Any]:
        """The kind of step, as the functions of `clipwise.accounting` take it."""
        found = {
            "sampling": str(self.scheme.sampling),
            "adjacency": str(self.adjacency),
            "unit": str(self.unit),
            "sample_rate": self.scheme.sample_rate,
            "period": self.scheme.period,
        }
        if isinstance(self.scheme, TruncatedPoisson):
            found |= {
                "dataset_size": self.scheme.dataset_size,
                "max_batch_size": self.scheme.max_batch_size,
            }
        return found

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.scheme.sampling} sampling at rate {self.scheme.sample_rate:.6g}, "
            f"{self.adjacency}"
            + ("" if self.unit is Unit.RECORD else f" of one {self.unit}")
            + (
                ", each block clipped as a whole (Batch)"
                if self.scheme.sampling is Sampling.PARTITION
                else ""
            )
        )


def plan_of(asked: Asked, delta: float, steps: int | None = None) -> Plan:
    """Make the options definite, by the same rules as `make_private`, or refuse them.

    Args:
        asked: the options.
        delta: for its warning, where it is too large for so many records.
        steps: the length of the run, if the options leave it out.
    """
    if asked.dataset_size is None and asked.batch_size is not None:
        raise ConfigurationError(
            "--batch-size needs --dataset-size: what counts is the rate between the two."
        )
    if asked.dataset_size is None and asked.sampling is Sampling.TRUNCATED_POISSON:
        raise ConfigurationError(
            "--sampling truncated-poisson needs --dataset-size: how often a batch is cut depends on it."
        )
    if not asked.has_rate:
        raise ConfigurationError("Give --sample-rate, or --batch-size and --dataset-size.")
    if not asked.has_length and steps is None:
        raise ConfigurationError("Give --steps or --epochs: every step costs privacy.")
    if asked.steps is not None and asked.epochs is not None:
        raise ConfigurationError("Give --epochs or --steps, not both.")
    extras: dict[str, Any] = {"max_batch_size": asked.max_batch_size}
    if asked.mini_sets is not None:
        extras["mini_sets"] = asked.mini_sets
    # A rate alone is enough for the cost: the number of records then plays no part.
    size = 1 if asked.dataset_size is None else asked.dataset_size
    with naming_options():
        scheme = make_scheme(asked.sampling, size, asked.batch_size, asked.sample_rate, **extras)
        _require_epochs(scheme)
        if asked.dataset_size is not None:  # for its warning: delta may be too large for so many records
            delta_of(delta, None, asked.dataset_size)
        planned = _length(asked, scheme) if asked.has_length else steps
    assert planned is not None  # one of them was given
    return Plan(scheme, adjacency_of(asked.adjacency, scheme.sampling), asked.unit, planned)


def _length(asked: Asked, scheme: Scheme) -> int:
    """The number of steps, if it can be counted."""
    try:
        planned = planned_steps(asked.epochs, asked.steps, scheme)
    except OverflowError:
        planned = None
    if planned is None or planned > MOST_STEPS:
        raise ConfigurationError(
            f"The run would have more than {MOST_STEPS:g} steps: give fewer epochs or a larger rate."
        )
    return planned


def _require_epochs(scheme: Scheme) -> None:
    try:
        _ = scheme.steps_per_epoch
    except OverflowError as error:  # 1 / rate is beyond every number
        raise ConfigurationError(
            f"--sample-rate {scheme.sample_rate:g} is too small: an epoch would never end."
        ) from error
