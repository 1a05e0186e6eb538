"""Privacy accounting: from events to epsilon, delta and noise.

Events are data (`clipwise.privacy.Event`). Accountants interpret them, and refuse events that they cannot bound. Every
figure is an upper bound:

- `pld` (privacy loss distributions) is tight, and takes milliseconds to tenths of a second;
- `rdp` (Renyi divergences) is looser, and takes microseconds per new step, for a live figure during training;
- `zcdp` and `gdp` (exact) are for steps that every unit takes part in;
- `dp-accounting` is the PLD accountant of that library, a second opinion, without fixed-size batches.

A noise multiplier is always the standard deviation of the noise over the sensitivity under the given adjacency:
std / C for a clipped sum under zero-out and add-remove, std / 2C under replace-one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clipwise.accounting import calibrate, from_arguments, repeat
from clipwise.accounting.accountants import delta_of, epsilon_of
from clipwise.accounting.calibrate import smallest_noise, steps_within
from clipwise.accounting.central_limit import CentralLimit
from clipwise.accounting.central_limit import of as central_limit_of
from clipwise.accounting.composition import compose
from clipwise.accounting.filter import Filter
from clipwise.accounting.repeat import Repetitions
from clipwise.accounting.tradeoff import Tradeoff
from clipwise.accounting.tradeoff import of as tradeoff_of
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Sampling, Unit
from clipwise.validation.arguments import number, one_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from clipwise.accounting.from_arguments import RunArguments, StepArguments

__all__ = [
    "CentralLimit",
    "Filter",
    "Repetitions",
    "Tradeoff",
    "central_limit",
    "central_limit_of",
    "delta",
    "delta_of",
    "epsilon",
    "epsilon_of",
    "noise_multiplier",
    "sample_rate",
    "search",
    "smallest_noise",
    "steps",
    "steps_within",
    "tradeoff",
    "tradeoff_of",
]


def epsilon(
    *,
    noise_multiplier: float | Sequence[float],
    sample_rate: float | None = None,
    steps: int | None = None,
    delta: float,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    unit: str | Unit = "record",
    period: int | None = None,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    accountant: str = "pld",
) -> float:
    """Epsilon of `steps` private steps at `delta`.

    Args:
        noise_multiplier: the standard deviation of the noise over the sensitivity under `adjacency`. 0 gives an
            infinite epsilon. A sequence is a schedule that is fixed in advance, with one multiplier per step.
        sample_rate: the probability that a given unit is in a batch.
        steps: the number of steps; may be left out for a schedule.
        delta: the delta of the guarantee.
        sampling: how batches are drawn: "poisson", "truncated-poisson", "fixed-size", "partition", "shuffled" or
            "full". The figure for "partition" holds only if each block is clipped as a whole, as `Batch` does.
        adjacency: "zero-out", "add-remove" or "replace-one"; by default that of the scheme.
        unit: "record", "microbatch" or "user". The multiplier and the rate are those of the unit.
        period: for "shuffled", the number of steps per epoch; sample_rate is then 1 / period.
        dataset_size: for "truncated-poisson", the number of units, or a bound on it.
        max_batch_size: for "truncated-poisson"; by default large enough that truncation costs nothing.
        accountant: "pld" (tight), "rdp" (cheap), "zcdp" or "gdp" (without amplification), or "dp-accounting".
    """
    run = from_arguments.history(
        noise_multiplier,
        steps,
        sample_rate=sample_rate,
        sampling=sampling,
        adjacency=adjacency,
        unit=unit,
        period=period,
        dataset_size=dataset_size,
        max_batch_size=max_batch_size,
    )
    return epsilon_of(run, delta, accountant)


def delta(*, epsilon: float, accountant: str = "pld", **run: Unpack[RunArguments]) -> float:
    """Delta of `steps` private steps at `epsilon`; the other arguments are those of `epsilon`."""
    return delta_of(from_arguments.history(**run), epsilon, accountant)


def noise_multiplier(*, epsilon: float, delta: float, steps: int, **kind: Unpack[StepArguments]) -> float:
    """The smallest noise multiplier for which `steps` steps cost at most `epsilon` at `delta`.

    It is rounded up by less than 0.1 percent. The other arguments are those of `epsilon`.
    """
    return smallest_noise(from_arguments.event(**kind), steps, from_arguments.budget(epsilon), delta)


def steps(*, epsilon: float, delta: float, noise_multiplier: float, **kind: Unpack[StepArguments]) -> int:
    """The largest number of steps that cost at most `epsilon` at `delta`; raises if even one step costs more.

    Large numbers are rounded down slightly. The other arguments are those of `epsilon`.
    """
    return calibrate.most_steps(from_arguments.event(noise_multiplier, **kind), epsilon, delta)


def sample_rate(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    steps: int | None = None,
    epochs: float | None = None,
    sampling: str | Sampling = "poisson",
    adjacency: str | Adjacency | None = None,
    unit: str | Unit = "record",
) -> float:
    """The largest sampling rate for which a run costs at most `epsilon` at `delta`; raises if there is none.

    Args:
        epsilon: the budget.
        delta: its delta.
        noise_multiplier: as for `epsilon`.
        steps: the number of steps at any rate; or
        epochs: the number of passes over the data: epochs / rate steps.
        sampling: "poisson", "fixed-size" or "partition" (if each block is clipped as a whole, as `Batch` does).
        adjacency: as for `epsilon`.
        unit: as for `epsilon`.
    """
    scheme = one_of("sampling", sampling, calibrate.SEARCHABLE)
    event = from_arguments.event(noise_multiplier, 1.0, scheme, adjacency, unit=unit)
    return calibrate.largest_rate(event, epsilon, delta, steps=steps, epochs=epochs)


def tradeoff(**run: Unpack[RunArguments]) -> Tradeoff:
    """A lower bound on the trade-off function (f-DP) of `steps` private steps; the arguments are those of `epsilon`."""
    return tradeoff_of(from_arguments.history(**run))


def central_limit(**run: Unpack[RunArguments]) -> CentralLimit:
    """The Gaussian approximation of `steps` private steps: no guarantee. The arguments are those of `epsilon`."""
    return central_limit_of(from_arguments.history(**run))


def search(
    history: Sequence[Entry] | None = None,
    *,
    mean: float,
    shape: float = 1.0,
    delta: float,
    **run: Unpack[RunArguments],
) -> float:
    """Epsilon at `delta` of a search: a random number of runs, of which only the best is released.

    It holds if the number of runs is drawn in advance by `Repetitions(mean, shape).draw()` and kept secret, and each
    run uses a candidate drawn at random from the same distribution.

    Args:
        history: the releases of one run, of the most expensive candidate if they differ; or describe it by the
            arguments of `epsilon`.
        mean: the mean number of runs.
        shape: that of `Repetitions`.
        delta: the delta of the guarantee.
        run: the arguments of `epsilon`, without a history.
    """
    repetitions = Repetitions(mean, shape)
    if history is None:
        history = from_arguments.history(**run)
    elif run:
        raise ConfigurationError("Give either history or the arguments that describe a run, not both.")
    return repeat.epsilon(compose(history), number("delta", delta, above=0, below=1), repetitions)
