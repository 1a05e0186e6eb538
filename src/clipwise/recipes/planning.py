"""What `clipwise train` fixes before the first release: the split of the rows, settings, noise and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from clipwise import accounting
from clipwise.engine.plan import planned_steps
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.recipes.building import device_of
from clipwise.recipes.config import Choices
from clipwise.recipes.counts import STRING_SHARE, NoisedCounts, noise_multiplier_for
from clipwise.recipes.kind import Settings, Source
from clipwise.recipes.sources import open_source
from clipwise.sampling.schemes import make_scheme

# The share of the budget for noised counts, if the kind of data names none.
COUNTS_SHARE = 0.1


@dataclass(frozen=True)
class RunPlan:
    """A run before its first release. Nothing here depends on the content of a record.

    Args:
        choices: of the user.
        source: the data.
        settings: of the training.
        training_rows, held_out_rows: positions in the source.
        delta: of the guarantee.
        steps: the number of training steps.
        event: one of these steps, with its noise multiplier; None without privacy.
        counts: the release of noised counts, if the preparation needs it.
        evaluation: the release of figures on the held-out rows, if there are any.
    """

    choices: Choices
    source: Source
    settings: Settings
    training_rows: np.ndarray
    held_out_rows: np.ndarray
    delta: float
    steps: int
    event: Event | None
    counts: Event | None
    evaluation: Event | None

    @property
    def epsilon(self) -> float:
        """The budget; infinity without privacy."""
        return math.inf if self.choices.epsilon is None else self.choices.epsilon

    def releases(self) -> list[Entry]:
        """The releases on the training rows."""
        counts = [] if self.counts is None else [Entry(self.counts, 1)]
        return counts if self.event is None else [*counts, Entry(self.event, self.steps)]


def plan_of(choices: Choices, source: Source | None = None) -> RunPlan:
    """Fix everything that the privacy of a run depends on. Reads no record. `source` is by default opened here."""
    source = open_source(choices) if source is None else source
    if choices.epsilon is None:
        raise ConfigurationError(
            "--epsilon is needed: the privacy budget, such as 3, or none to train without privacy."
        )
    training, held_out = split(len(source), choices.held_out_share if source.has_figures else Fraction(0))
    delta = default_delta(len(source)) if choices.delta is None else choices.delta
    if choices.is_private and delta >= 1 / len(training):
        raise ConfigurationError(
            f"--delta {delta:g} is not below 1 / {len(training)}, one over the number of training rows: publishing a "
            "random record would satisfy it. Leave --delta out, or give a much smaller one."
        )
    if choices.model is not None and choices.model not in source.models:
        raise ConfigurationError(
            f"--model {choices.model!r} is not known for data of the kind {source.kind!r}: use "
            f"{' or '.join(source.models)}."
        )
    if choices.groups is not None:
        source.require_groups(choices.groups)
    settings = choices.settings(source.defaults(len(training), choices.epsilon, choices.preset))
    if settings.views > 1 and settings.model not in source.augmented_models:
        raise ConfigurationError(
            f"--augmentation is not possible with the model {settings.model!r}: leave it out, or train images with "
            "--model tanh-cnn or --model wrn-16-4."
        )
    device_of(choices)
    settings = replace(settings, batch_size=_batch_size(choices, settings, len(training)))
    scheme = make_scheme("poisson", len(training), settings.batch_size, None)
    steps = planned_steps(settings.epochs, None, scheme)
    assert steps is not None
    if not choices.is_private:
        return RunPlan(choices, source, settings, training, held_out, delta, steps, None, None, None)
    counts = None
    if source.needs_counts():
        settings = replace(settings, counts_share=_counts_share(choices, settings))
        counts = counts_event(settings.counts_share, choices.epsilon, delta)
    step = scheme.event(1.0, Adjacency.ZERO_OUT, Unit.RECORD)
    beside = [] if counts is None else [Entry(counts, 1)]
    step = replace(step, noise_multiplier=accounting.smallest_noise(step, steps, choices.epsilon, delta, beside))
    evaluation = evaluation_event(choices.epsilon, delta) if len(held_out) else None
    return RunPlan(choices, source, settings, training, held_out, delta, steps, step, counts, evaluation)


def split(rows: int, share: Fraction) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the training rows and of the held-out rows: every tenth row for a share of 1/10.

    The split depends on positions alone, so it costs no privacy.
    """
    if rows == 0:
        raise ConfigurationError("The data have no rows.")
    index = np.arange(rows, dtype=np.int64)
    ends = (index + 1) * share.numerator // share.denominator
    is_held_out = ends > index * share.numerator // share.denominator
    return index[~is_held_out], index[is_held_out]


def default_delta(rows: int) -> float:
    """A delta well below 1 / rows: at most 1e-5 and at most 1 / (10 rows), rounded down to one digit."""
    if rows <= 10_000:
        return 1e-5
    digits = f"{1 / (10 * rows):.0e}"
    return float(digits) if float(digits) <= 1 / (10 * rows) else float(f"{float(digits[0]) - 1:g}{digits[1:]}")


def counts_event(share: float, epsilon: float, delta: float) -> Event:
    """The release of noised counts with this share of the budget."""
    z = noise_multiplier_for(share, epsilon, delta)
    event = NoisedCounts(z, lambda _: None, delta=STRING_SHARE * delta).event(strings=True)
    return replace(event, purpose="preparation")


def evaluation_event(epsilon: float, delta: float) -> Event:
    """The release of noised figures on the held-out rows, with the same budget as the training.

    Training and held-out rows are disjoint, so by parallel composition the run costs the larger of the two.
    """
    event = Event(Sampling.FULL, Adjacency.ZERO_OUT, Unit.RECORD, 1.0, 1.0, purpose="evaluation")
    return replace(event, noise_multiplier=accounting.smallest_noise(event, 1, epsilon, delta))


def _batch_size(choices: Choices, settings: Settings, rows: int) -> int:
    if choices.batch_size is not None and choices.batch_size > rows:
        raise ConfigurationError(f"--batch-size {choices.batch_size} is larger than the {rows} training rows.")
    return min(settings.batch_size, rows)


def _counts_share(choices: Choices, settings: Settings) -> float:
    share = settings.counts_share or COUNTS_SHARE
    if choices.counts_share == 0:
        raise ConfigurationError(
            "counts_share is 0, and something that the preparation of the data needs is not declared: declare it with "
            "--schema and --labels, or allow a share of the budget for noised counts."
        )
    return share
