"""The sentences that statements and commands share: what a guarantee is about, and what it is not about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clipwise.clipping.noised_statistics import STATISTICS_OF
from clipwise.privacy import Adjacency, Part, Sampling, Unit

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
    "not accounted: this is the cost of {these}, and other runs on the same data, tried and thrown away, cost as "
    "well (`clipwise epsilon` counts several ledgers, or a search)"
)

# Of runs that share a ledger.
FIXED_RUNS = (
    "the attacker's figures, and the PLD figure, hold if all runs were fixed before the first release; the guarantee "
    "holds also for runs that were configured after releases of others were seen"
)

NO_PUBLIC_DATA = "none is known here"
TAKEN_AS_PUBLIC = "first weights and constants that come from other data are taken as public"

NOT_COVERED = (
    "data-dependent preprocessing and feature selection",
    "hyper-parameters chosen by looking at the same data",
    "anything printed or logged from private batches, such as the training loss",
    "other runs on the same data",
    "refusals by checks that look at private batches: that a run was refused, or was not, is an output outside of "
    "epsilon",
    "side channels such as the time a step takes",
    "what is true of the population, whether or not a given {unit} takes part",
)

LOW_BITS = "the low bits of floating-point numbers: noise='secure' is against attacks on these"

NOISE: Mapping[str, str] = {
    "standard": "Gaussian in floating point with a tail that is not cut, from a counter generator (Philox) with a "
    "secret key",
    "secure": "Gaussian, rounded exactly to a grid that the sum was rounded to before; from a cipher (ChaCha20) with a "
    "secret key",
}
PSEUDO_RANDOM: Mapping[str, str] = {
    "standard": "the counter generator's numbers pass for random ones: it is a statistical generator, and no cipher",
    "secure": "ChaCha20 cannot be told from random words (who is in a batch is drawn by statistical generators)",
}

INDEPENDENT = "each loss depends on its own example only"

# Noise and samples of a run with a given seed are those of every other run with it.
NO_GUARANTEE = "none is claimed: noise and samples come from a given seed and are reproducible"
WITH_A_FRESH_KEY = "with a key from the operating system the same run would have"

KEY_IS_SECRET = "noise and sampling are as random as the operating system, and their key stays secret"
KEY_IS_GIVEN = (
    "noise and sampling come from a given seed, so that this run can be repeated: whoever knows the seed can take the "
    "noise off, and a second run with it has the same noise on another sum"
)

# With a known seed, which numbers a record's rows get depends on who else was drawn.
RANDOM_LAYERS: Mapping[str | None, str] = {
    None: "random layers and augmentations, such as dropout, draw from a generator whose seed is secret (torch's own "
    "keeps 32 bits of it on a CPU; private.randomness() draws from the run's key)",
    "key": "random layers drew from the run's key; augmentations outside of private.randomness() draw from a generator "
    "whose seed is secret",
    "seeded": "torch's generator was seeded by hand while random layers, such as dropout, drew from it: that seed is "
    "secret, and nobody can guess it",
}

PENALISED = "the penalty that is added after the noise looks at the weights alone, and at no record"

FOLLOWED_METRIC = (
    "the learning rate followed a metric: that metric is of public data or of released values, and not of the "
    "private data"
)

OWNED = (
    "all records of a user carry the same id, and no other user's records do; the ids are public, and stay when "
    "records are replaced"
)

# What is known of the weights.
VERIFIED = "verified: every parameter and buffer is what the releases of this run left"
CHANGED_SINCE = (
    "verified when the run was closed; the model was changed since then, and this statement is not about what it holds "
    "now"
)
CLOSED = "verified when the run was closed: every parameter and buffer was what the releases left"
NOT_CLOSED = "not verified: the run goes on, was not closed, or was written by an older version"
NOT_VERIFIED = (
    "NOT VERIFIED: when the run was closed, the model had been changed by something else than its releases. The "
    "guarantee is for the released gradients, and not for that model"
)


def declared(updates: Sequence[tuple[str, str]]) -> list[str]:
    """What a user declared about changes of the weights that no release made, once each."""
    counts = {update: updates.count(update) for update in updates}
    return [
        f"asserted by the user, not verified: {kind}: {reason}" + (f" ({n} times)" if n > 1 else "")
        for (kind, reason), n in counts.items()
    ]


_NEIGHBOURS: Mapping[str, str] = {
    "zero-out": "one {unit} replaced by an empty one (the number of {unit}s is public)",
    "add-remove": "one {unit} added or removed (the number of {unit}s is not public)",
    "replace-one": "one {unit} replaced by another (the number of {unit}s is public)",
}

_SAMPLING: Mapping[str, str] = {
    "poisson": "every {unit} by its own coin",
    "truncated-poisson": "every {unit} by its own coin; a batch above a public limit is cut at random",
    "fixed-size": "a random subset of constant size",
    "partition": "blocks of a partition that was fixed beforehand, independent of the data; each is clipped as a whole",
    "shuffled": "each {unit} once an epoch, in random order; nothing is claimed for the order",
    "full": "every {unit} in every step",
}


def neighbours(adjacency: Adjacency, unit: Unit) -> str:
    """The two data sets that a guarantee makes hard to tell apart."""
    return _NEIGHBOURS[str(adjacency)].format(unit=unit)


def drawn(sampling: Sampling, unit: Unit) -> str:
    """How a batch comes about."""
    return _SAMPLING[str(sampling)].format(unit=unit)


def beside(parts: Sequence[Part]) -> str:
    """What a step releases beside the sum, as a list goes on: counts, and statistics of layers."""
    layers = sum(map(_is_statistics, parts))
    found = " and the counts" if counts(parts) else ""
    return found + (
        f" and the clipped statistics of {layers} batch norm layer{'s' * (layers > 1)}" if layers else ""
    )


def counts(parts: Sequence[Part]) -> bool:
    """Whether examples are counted: a part without parameters is a count, or else statistics of a layer."""
    return any(not p.parameters and not _is_statistics(p) for p in parts)


def _is_statistics(part: Part) -> bool:
    return not part.parameters and part.name.startswith(STATISTICS_OF)


def planned(tests: Sequence[str] | None) -> str:
    """Which tests run the loss again on the first batches. What they find is no part of a statement."""
    if tests is None:
        return "not recorded whether a replacement test was planned"
    if not tests:
        return "no replacement test could run: it needs make_private(loss=...), or clipwise.check and public rows"
    collation = " and of how records are collated" if "collation" in tests else ""
    return f"a replacement test of the losses{collation} was planned on the first batches"


def not_covered(unit: Unit, noise: str | None = None) -> tuple[str, ...]:
    """What nobody may read into the guarantee."""
    low_bits = () if noise == "secure" else (LOW_BITS,)
    return (*(line.format(unit=unit) for line in NOT_COVERED), *low_bits)


def public_data(of_strategy: str, statistics: Mapping[str, Any] | None) -> str:
    """Which public data a run used, and what for: for its strategy's constants, or in layers of the model."""
    used = [of_strategy] if of_strategy else []
    if statistics and statistics.get("rows"):
        used.append(f"{statistics['rows']} rows, for the statistics of normalization layers")
    return f"{'; '.join(used) or NO_PUBLIC_DATA}: {TAKEN_AS_PUBLIC}"


def what_moves(parts: Sequence[Part], unit: Unit) -> str:
    """How the sensitivities of parts are meant, where that is not all parts of the sum itself."""
    found = ""
    if any(p.alone for p in parts):
        found += (
            f"; a {unit} moves one of these parts only, drawn at random: the draw must stay secret, and no "
            "amplification is claimed for it"
        )
    if any(p.scales for p in parts):
        found += (
            "; of the scaled sum: gradients are multiplied by public factors before the clip, and divided by them "
            "after the noise"
        )
    return found
