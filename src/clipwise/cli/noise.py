"""`clipwise noise`: whichever of noise, length and batch size is left out, for a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clipwise import accounting
from clipwise.cli import accountants, plan
from clipwise.cli.naming import naming_options
from clipwise.cli.output import in_words, remark, rounded_up, say, stdout
from clipwise.cli.places import require_picture
from clipwise.engine.plan import adjacency_of
from clipwise.errors import ConfigurationError
from clipwise.privacy import Sampling, Unit
from clipwise.report import plots


def noise(
    epsilon: Annotated[float, typer.Option(help="The privacy budget: what the whole run may cost.")],
    noise_multiplier: plan.NoiseMultiplier = None,
    sample_rate: plan.SampleRate = None,
    batch_size: plan.BatchSize = None,
    dataset_size: plan.DatasetSize = None,
    steps: plan.Steps = None,
    epochs: plan.Epochs = None,
    delta: plan.Delta = 1e-5,
    sampling: plan.HowSampled = Sampling.POISSON,
    adjacency: plan.Neighbours = None,
    unit: plan.Protected = Unit.RECORD,
    max_batch_size: plan.MaxBatchSize = None,
    mini_sets: plan.MiniSets = None,
    second_opinion: accountants.SecondOpinion = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw epsilon over the steps of that run to this file: .png or .svg.")
    ] = None,
) -> None:
    """What keeps a run within a budget: the noise, the number of steps, or the batch size.

    Give the budget and two of the three; the one that is left out is computed. The least noise:

        clipwise noise --epsilon 3 --batch-size 256 --dataset-size 60000 --epochs 20

    The most steps, and the largest batches:

        clipwise noise --epsilon 3 --noise-multiplier 1.1 --batch-size 256 --dataset-size 60000

        clipwise noise --epsilon 3 --noise-multiplier 1.1 --steps 5000 --dataset-size 60000

    The noise multiplier is the standard deviation of the noise over the sensitivity of the clipped sum. With
    clipping at norm C and Poisson sampling, each coordinate of the sum gets noise of that times C. The
    answer is checked with the PLD accountant; `make_private(epsilon=...)` asks the first question.
    """
    require_picture(plot)
    asked = plan.Asked(
        sampling=sampling,
        adjacency=adjacency,
        unit=unit,
        sample_rate=sample_rate,
        batch_size=batch_size,
        dataset_size=dataset_size,
        max_batch_size=max_batch_size,
        mini_sets=mini_sets,
        steps=steps,
        epochs=epochs,
    )
    with naming_options():
        answer, run, multiplier = _solve(asked, epsilon, delta, noise_multiplier)
        history = run.history(multiplier)
    reached = accounting.epsilon_of(history, delta)
    if plot is not None:
        plots.epsilon_over_steps(history, delta, plot)
        remark(f"Drawn to {plot}")
    say(f"{run}, noise multiplier {multiplier:g}")
    say(answer, style="bold")
    stdout().print(accountants.table_of(history, delta, second_opinion))
    say(in_words(reached, delta, run.adjacency, run.unit, accounting.tradeoff_of(history)))


def _solve(
    asked: plan.Asked, epsilon: float, delta: float, noise_multiplier: float | None
) -> tuple[str, plan.Plan, float]:
    """The answer in words, and the run that it makes definite."""
    missing = [
        name
        for name, given in (
            ("--noise-multiplier", noise_multiplier is not None),
            ("--steps or --epochs", asked.has_length),
            ("--sample-rate or --batch-size", asked.has_rate),
        )
        if not given
    ]
    if not missing:
        raise ConfigurationError(
            "Noise, length and batch size are all given: leave out the one that --epsilon shall decide, or ask "
            "`clipwise epsilon` what they cost."
        )
    if len(missing) > 1:
        raise ConfigurationError(
            f"Give all but one of noise, length and batch size. Left out are {' and '.join(missing)}; the batch "
            "size may be given as --sample-rate, or as --batch-size with --dataset-size."
        )
    if noise_multiplier is None:
        return _least_noise(asked, epsilon, delta)
    if not asked.has_length:
        return _most_steps(asked, epsilon, delta, noise_multiplier)
    return _largest_batches(asked, epsilon, delta, noise_multiplier)


def _least_noise(asked: plan.Asked, epsilon: float, delta: float) -> tuple[str, plan.Plan, float]:
    run = plan.plan_of(asked, delta)
    found = accounting.noise_multiplier(epsilon=epsilon, delta=delta, steps=run.steps, **run.arguments())
    shown = rounded_up(found, 6)  # more noise than found, if anything
    return f"Least noise: a multiplier of {shown}", run, float(shown)


def _most_steps(asked: plan.Asked, epsilon: float, delta: float, z: float) -> tuple[str, plan.Plan, float]:
    run = plan.plan_of(asked, delta, steps=1)
    found = accounting.steps(epsilon=epsilon, delta=delta, noise_multiplier=z, **run.arguments())
    run = replace(run, steps=found)
    # Rounded down: so many epochs fit.
    epochs = math.floor(100 * found / run.scheme.steps_per_epoch) / 100
    return f"Most steps: {found}, which is {epochs:g} epochs", run, z


def _largest_batches(
    asked: plan.Asked, epsilon: float, delta: float, z: float
) -> tuple[str, plan.Plan, float]:
    if asked.sampling not in (Sampling.POISSON, Sampling.FIXED_SIZE):
        raise ConfigurationError(
            f"The batch size cannot be left out with --sampling {asked.sampling}: give --batch-size and leave out "
            "the noise or the length."
        )
    length: dict[str, Any] = {"steps": asked.steps} if asked.epochs is None else {"epochs": asked.epochs}
    if asked.epochs is not None and asked.steps is not None:
        raise ConfigurationError("Give --epochs or --steps, not both.")
    rate = accounting.sample_rate(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=z,
        sampling=str(asked.sampling),
        adjacency=str(adjacency_of(asked.adjacency, asked.sampling)),
        unit=str(asked.unit),
        **length,
    )
    if asked.dataset_size is None:
        if asked.sampling is Sampling.FIXED_SIZE:
            raise ConfigurationError(
                "--sampling fixed-size needs --dataset-size: its batches have whole sizes."
            )
        if asked.epochs is not None:
            rate = 1 / math.ceil(1 / rate)  # an epoch has a whole number of steps
        run = plan.plan_of(replace(asked, sample_rate=rate), delta)
        return f"Largest batches: a rate of {rate:.6g}", run, z
    run = _of_whole_size(asked, epsilon, delta, z, rate)
    return (
        f"Largest batches: {run.scheme.expected_size:g} records, a rate of {run.scheme.sample_rate:.6g}",
        run,
        z,
    )


def _of_whole_size(asked: plan.Asked, epsilon: float, delta: float, z: float, rate: float) -> plan.Plan:
    """The run with the largest batch size near `rate` that fits: sizes are whole, and so are steps in an epoch."""
    assert asked.dataset_size is not None

    def of_size(size: int) -> plan.Plan:
        return plan.plan_of(replace(asked, batch_size=size), delta)

    def fits(size: int) -> bool:
        return accounting.epsilon_of(of_size(size).history(z), delta) <= epsilon

    size = math.floor(rate * asked.dataset_size)
    while size > 0 and not fits(size):
        size -= 1
    if size == 0:
        raise ConfigurationError(
            f"--epsilon {epsilon:g} allows a rate of {rate:.3g} at most: less than one record in a batch. Give more "
            "noise, fewer steps or a larger budget."
        )
    while size < asked.dataset_size and fits(size + 1):
        size += 1
    return of_size(size)
