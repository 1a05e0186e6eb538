"""`clipwise noise`: compute the noise, the length or the batch size that fits a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from clipwise import accounting
from clipwise.accounting.calibrate import most_steps
from clipwise.accounting.from_arguments import budget
from clipwise.cli.options import takes_options
from clipwise.cli.output import draw, in_words, require_picture, rounded_up, say, stdout
from clipwise.cli.run_options import ResolvedRun, RunOptions, SecondOpinion, naming_options, plan_of, table_of
from clipwise.engine.plan import adjacency_of
from clipwise.errors import ConfigurationError
from clipwise.privacy import Sampling
from clipwise.report import plots
from clipwise.validation.arguments import number


@takes_options
def noise(
    epsilon: Annotated[float, typer.Option(help="The privacy budget: the most that the whole run may cost.")],
    options: RunOptions,
    second_opinion: SecondOpinion = False,
    plot: Annotated[Path | None, typer.Option(help="Plot epsilon over the steps to this file: .png or .svg.")] = None,
) -> None:
    """Compute the noise, the number of steps or the batch size that keeps a run within a budget.

    Give the budget and two of noise, length and batch size; the command computes the third. The least noise:

        clipwise noise --epsilon 3 --batch-size 256 --dataset-size 60000 --epochs 20

    The most steps, and the largest batches:

        clipwise noise --epsilon 3 --noise-multiplier 1.1 --batch-size 256 --dataset-size 60000

        clipwise noise --epsilon 3 --noise-multiplier 1.1 --steps 5000 --dataset-size 60000

    The noise multiplier is the standard deviation of the noise over the sensitivity of the clipped sum. With
    clipping norm C and Poisson sampling, the noise on each coordinate of the sum has standard deviation
    noise multiplier times C. The PLD accountant confirms the answer. `make_private(epsilon=...)` computes the noise
    in the same way.
    """
    require_picture(plot)
    with naming_options():
        answer, run, multiplier = _solve(options, epsilon)
        history = run.history(multiplier)
    reached = accounting.epsilon_of(history, options.delta)
    draw(plot, lambda file: plots.epsilon_over_steps(history, options.delta, file))
    say(f"{run}, noise multiplier {multiplier:g}")
    say(answer, style="bold")
    stdout().print(table_of(history, options.delta, second_opinion))
    say(in_words(reached, options.delta, run.adjacency, run.unit, accounting.tradeoff_of(history)))


Solved = tuple[str, ResolvedRun, float]  # the answer in words, the resulting run, and its noise multiplier


def _solve(options: RunOptions, epsilon: float) -> Solved:
    given = {
        "--noise-multiplier": options.noise_multiplier is not None,
        "--steps or --epochs": options.has_length,
        "--sample-rate or --batch-size": options.has_rate,
    }
    missing = [name for name, is_given in given.items() if not is_given]
    if not missing:
        raise ConfigurationError(
            "Noise, length and batch size are all given: leave out the one to compute from --epsilon, or use "
            "`clipwise epsilon` for their cost."
        )
    if len(missing) > 1:
        raise ConfigurationError(
            f"Give all but one of noise, length and batch size. Missing are {' and '.join(missing)}; give the batch "
            "size as --sample-rate, or as --batch-size with --dataset-size."
        )
    if options.noise_multiplier is None:
        return _least_noise(options, epsilon)
    if not options.has_length:
        return _most_steps(options, epsilon, options.noise_multiplier)
    return _largest_batches(options, epsilon, options.noise_multiplier)


def _least_noise(options: RunOptions, epsilon: float) -> Solved:
    run = plan_of(options)
    found = accounting.smallest_noise(run.event(1.0), run.steps, budget(epsilon), options.delta)
    shown = rounded_up(found, 6)  # the printed value is at least the one found
    return f"Least noise: a multiplier of {shown}", run, float(shown)


def _most_steps(options: RunOptions, epsilon: float, z: float) -> Solved:
    run = plan_of(options, steps=1)
    found = most_steps(run.event(number("noise_multiplier", z, least=0)), epsilon, options.delta)
    run = replace(run, steps=found)
    # Rounded down, so that this many epochs fit.
    epochs = math.floor(100 * found / run.scheme.steps_per_epoch) / 100
    return f"Most steps: {found}, which is {epochs:g} epochs", run, z


def _largest_batches(options: RunOptions, epsilon: float, z: float) -> Solved:
    if options.sampling not in (Sampling.POISSON, Sampling.FIXED_SIZE):
        raise ConfigurationError(
            f"The batch size cannot be left out with --sampling {options.sampling}: give --batch-size and leave out "
            "the noise or the length."
        )
    if options.epochs is not None and options.steps is not None:
        raise ConfigurationError("Give --epochs or --steps, not both.")
    rate = accounting.sample_rate(
        epsilon=epsilon,
        delta=options.delta,
        noise_multiplier=z,
        sampling=str(options.sampling),
        adjacency=str(adjacency_of(options.adjacency, options.sampling)),
        unit=str(options.unit),
        **({"steps": options.steps} if options.epochs is None else {"epochs": options.epochs}),
    )
    if options.dataset_size is None:
        if options.sampling is Sampling.FIXED_SIZE:
            raise ConfigurationError(
                "--sampling fixed-size needs --dataset-size, because its batch size is a whole number."
            )
        if options.epochs is not None:
            rate = 1 / math.ceil(1 / rate)  # an epoch has a whole number of steps
        return f"Largest batches: a rate of {rate:.6g}", plan_of(replace(options, sample_rate=rate)), z
    run = _of_whole_size(options, epsilon, z, rate)
    size, rate = run.scheme.expected_size, run.scheme.sample_rate
    return f"Largest batches: {size:g} records, a rate of {rate:.6g}", run, z


def _of_whole_size(options: RunOptions, epsilon: float, z: float, rate: float) -> ResolvedRun:
    """The run with the largest whole batch size near `rate` that fits the budget."""
    assert options.dataset_size is not None

    def of_size(size: int) -> ResolvedRun:
        return plan_of(replace(options, batch_size=size))

    def fits(size: int) -> bool:
        return accounting.epsilon_of(of_size(size).history(z), options.delta) <= epsilon

    size = math.floor(rate * options.dataset_size)
    while size > 0 and not fits(size):
        size -= 1
    if size == 0:
        raise ConfigurationError(
            f"--epsilon {epsilon:g} allows a rate of at most {rate:.3g}: less than one record per batch. Give more "
            "noise, fewer steps or a larger budget."
        )
    while size < options.dataset_size and fits(size + 1):
        size += 1
    return of_size(size)
