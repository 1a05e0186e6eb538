"""The sentences that statements and commands share: what a guarantee is about, and what it is not about."""

from __future__ import annotations

from collections.abc import Mapping

from clipwise.privacy import Adjacency, Sampling, Unit

DEFINITION = "(epsilon, delta)-differential privacy"

SETTING = (
    "central: whoever trains sees the data and is trusted; whoever sees what is released is not, and may know "
    "everything else"
)

RELEASED = (
    "every noised gradient, and so all weights on the way and the last ones; whatever is computed from these "
    "without the data is covered too"
)

TUNING = (
    "not accounted: this is the cost of one run, and other runs on the same data, tried and thrown away, cost as "
    "well (`clipwise epsilon` counts several ledgers, or a search)"
)

PUBLIC_DATA = "none is known here: first weights and constants that come from other data are taken as public"

NOT_COVERED = (
    "data-dependent preprocessing and feature selection",
    "hyper-parameters chosen by looking at the same data",
    "anything printed or logged from private batches, such as the training loss",
    "other runs on the same data",
    "side channels such as the time a step takes, and the low bits of floating-point numbers",
    "what is true of the population, whether or not a given {unit} takes part",
)

_NEIGHBOURS: Mapping[str, str] = {
    "zero-out": "one {unit} replaced by an empty one (the number of {unit}s is public)",
    "add-remove": "one {unit} added or removed (the number of {unit}s is not public)",
    "replace-one": "one {unit} replaced by another (the number of {unit}s is public)",
}

_SAMPLING: Mapping[str, str] = {
    "poisson": "every {unit} by its own coin",
    "truncated-poisson": "every {unit} by its own coin; a batch above a public limit is cut at random",
    "fixed-size": "a random subset of constant size",
    "partition": "blocks of a partition that was fixed beforehand, independent of the data",
    "shuffled": "each {unit} once an epoch, in random order; nothing is claimed for the order",
    "full": "every {unit} in every step",
}


def neighbours(adjacency: Adjacency, unit: Unit) -> str:
    """The two data sets that a guarantee makes hard to tell apart."""
    return _NEIGHBOURS[str(adjacency)].format(unit=unit)


def drawn(sampling: Sampling, unit: Unit) -> str:
    """How a batch comes about."""
    return _SAMPLING[str(sampling)].format(unit=unit)


def not_covered(unit: Unit) -> tuple[str, ...]:
    """What nobody may read into the guarantee."""
    return tuple(line.format(unit=unit) for line in NOT_COVERED)
