"""Sentences shared by privacy statements and commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipwise.clipping.noised_statistics import STATISTICS_OF
from clipwise.privacy import Adjacency, Event, Part, Sampling, Unit, rounded_up

DEFINITION = "(epsilon, delta)-differential privacy"

SETTING = (
    "central model: the trainer is trusted with the data; an attacker sees all releases and may know everything except "
    "the data of one unit and the secret key"
)

RELEASED = (
    "every noised gradient, and therefore all intermediate and final weights; anything computed from these without "
    "the data is covered (post-processing)"
)

TUNING = (
    "not accounted: the figures are the cost of {these}; other runs on the same data, including discarded ones, add "
    "to the cost (`clipwise epsilon` composes several ledgers, or a hyperparameter search)"
)

FIXED_RUNS = (
    "the bounds on attacks and the PLD epsilon hold if all runs were fixed before the first release; the guarantee "
    "holds even if a run was configured after seeing releases of other runs"
)

PLANNED = (
    "the noise of the preparation, and the noise, sampling rate and number of the training steps, were fixed before "
    "the first release, as recorded in the ledger"
)

PURPOSE: Mapping[str, str] = {
    "preparation": "noised counts of the records, from which the encoding of the data was made",
    "evaluation": "noised figures of the accuracy on the records",
}

NO_PUBLIC_DATA = "none recorded"
TAKEN_AS_PUBLIC = "initial weights and constants derived from other data are assumed to be public"

NOT_COVERED = (
    "data-dependent preprocessing and feature selection",
    "hyperparameters chosen by looking at the same data",
    "anything printed or logged from private batches, such as the training loss",
    "other runs on the same data",
    "errors raised by checks on private batches: whether a run was refused is an output that epsilon does not cover",
    "side channels, such as the duration of a step",
    "facts about the population, which hold whether or not a given {unit} is in the data set",
)

LOW_BITS = "attacks on the low bits of floating-point numbers (noise='secure' protects against them)"

NOISE: Mapping[str, str] = {
    "standard": "floating-point Gaussian with untruncated tails, from a counter-based generator (Philox) with a secret "
    "key",
    "secure": "Gaussian, rounded exactly to the same grid as the sum; from a cipher (ChaCha20) with a secret key",
}
PSEUDO_RANDOM: Mapping[str, str] = {
    "standard": "the output of the counter-based generator is indistinguishable from random numbers: it is a "
    "statistical generator, not a cipher",
    "secure": "ChaCha20 is indistinguishable from random bits (batches are sampled with statistical generators)",
}

INDEPENDENT = "each loss depends on its own example only"
PROBED: Mapping[bool | None, str] = {
    True: "probed on the first batches, not proven",
    False: "not probed, not proven",
    None: "not recorded whether this was probed",
}

NO_GUARANTEE = "none is claimed: noise and sampling come from a given seed and are reproducible"
WITH_A_FRESH_KEY = "with a key from the operating system the same run would have"

KEY_IS_SECRET = "the key of noise and sampling comes from the operating system's random generator and stays secret"
KEY_IS_GIVEN = (
    "noise and sampling come from a given seed, so that the run is reproducible: anyone with the seed can subtract the "
    "noise, and a second run with this seed adds the same noise to another sum"
)

# With a known seed, the random numbers of a record depend on the other records in the batch.
RANDOM_LAYERS: Mapping[str | None, str] = {
    None: "random layers and augmentations, such as dropout, use a generator with a secret seed (torch's CPU generator "
    "keeps 32 bits of its seed; private.randomness() uses the run's key)",
    "key": "random layers used the run's key; augmentations outside of private.randomness() use a generator with a "
    "secret seed",
    "seeded": "the user seeded the torch generator that random layers, such as dropout, used: that seed is secret and "
    "cannot be guessed",
}

PENALISED = "the penalty that is added after the noise depends only on the weights, not on the data"

FOLLOWED_METRIC = (
    "the learning rate depended on a metric: the metric was computed from public data or released values, not from "
    "the private data"
)

OWNED = (
    "all records of a user, and no other records, have the id of that user; the ids are public, and do not change when "
    "records are replaced"
)

# Verification of the weights.
VERIFIED = "verified: every parameter and buffer is the result of the releases of this run"
CHANGED_SINCE = (
    "verified when the run was closed; the model has changed since then, and this statement does not cover its current "
    "weights"
)
CLOSED = "verified when the run was closed: every parameter and buffer was the result of the releases"
NOT_CLOSED = "not verified: the run is in progress, was not closed, or was recorded by an older version"
NOT_VERIFIED = (
    "NOT VERIFIED: when the run was closed, something other than its releases had changed the model. The guarantee "
    "covers the released gradients, not that model"
)


def declared(updates: Sequence[tuple[str, str]]) -> list[str]:
    """The changes of the weights that the user declared, each one once."""
    counts = {update: updates.count(update) for update in updates}
    return [
        f"asserted by the user, not verified: {kind}: {reason}" + (f" ({n} times)" if n > 1 else "")
        for (kind, reason), n in counts.items()
    ]


def besides_training(event: Event, count: int) -> str:
    """A line about a release that is no step of a training."""
    bound = f", and a failure probability of at most {event.excess:.3g}" if event.excess else ""
    return (
        f"{count} release{'s' * (count > 1)} of {PURPOSE[event.purpose]}, without sampling: a Gaussian mechanism with "
        f"noise multiplier {event.noise_multiplier:.4g}{bound}"
    )


CHANGED: Mapping[Adjacency, str] = {
    Adjacency.ZERO_OUT: "replaced by an empty one",
    Adjacency.ADD_REMOVE: "added or removed",
    Adjacency.REPLACE_ONE: "replaced by any other",
}
_NEIGHBOURS: Mapping[str, str] = {
    "zero-out": "one {unit} is replaced by an empty one (the number of {unit}s is public)",
    "add-remove": "one {unit} is added or removed (the number of {unit}s is not public)",
    "replace-one": "one {unit} is replaced by another (the number of {unit}s is public)",
}

_SAMPLING: Mapping[str, str] = {
    "poisson": "each {unit} is included independently with this probability",
    "truncated-poisson": "each {unit} is included independently with this probability; a batch above a public limit is "
    "reduced to a uniform subset",
    "fixed-size": "a uniform random subset of constant size",
    "partition": "uniformly drawn blocks of a partition that was fixed in advance, independently of the data; each "
    "block is clipped as a whole",
    "shuffled": "each {unit} is used once per epoch, in random order; no amplification is claimed",
    "full": "every {unit} is used in every step",
}


def neighbours(adjacency: Adjacency, unit: Unit) -> str:
    """The neighbouring relation in words."""
    return _NEIGHBOURS[str(adjacency)].format(unit=unit)


def drawn(sampling: Sampling, unit: Unit) -> str:
    """The sampling scheme in words."""
    return _SAMPLING[str(sampling)].format(unit=unit)


def beside(parts: Sequence[Part]) -> str:
    """The other releases of a step, as a continuation of a list: counts and layer statistics."""
    layers = sum(map(_is_statistics, parts))
    found = " and the counts" if counts(parts) else ""
    return found + (f" and the clipped statistics of {layers} batch norm layer{'s' * (layers > 1)}" if layers else "")


def counts(parts: Sequence[Part]) -> bool:
    """Whether any part is a count. A part without parameters is a count or the statistics of a layer."""
    return any(not p.parameters and not _is_statistics(p) for p in parts)


def _is_statistics(part: Part) -> bool:
    return not part.parameters and part.name.startswith(STATISTICS_OF)


def planned(tests: Sequence[str] | None) -> str:
    """The planned tests of the loss. Their results are not part of a statement."""
    if tests is None:
        return "not recorded whether a replacement test was planned"
    if not tests:
        return "no replacement test could run: it requires make_private(loss=...), or clipwise.check with public rows"
    collation = " and of the collation of records" if "collation" in tests else ""
    return f"a replacement test of the losses{collation} was planned on the first batches"


def not_covered(unit: Unit, noise: str | None = None) -> tuple[str, ...]:
    """What the guarantee does not cover."""
    low_bits = () if noise == "secure" else (LOW_BITS,)
    return (*(line.format(unit=unit) for line in NOT_COVERED), *low_bits)


def public_data(of_strategy: str, statistics: Mapping[str, Any] | None) -> str:
    """The public data of a run and its use: for constants of the strategy, or in layers of the model."""
    used = [of_strategy] if of_strategy else []
    if statistics and statistics.get("rows"):
        used.append(f"{statistics['rows']} rows, for the statistics of normalization layers")
    return f"{'; '.join(used) or NO_PUBLIC_DATA}: {TAKEN_AS_PUBLIC}"


def what_moves(parts: Sequence[Part], unit: Unit) -> str:
    """A note on the sensitivities, if each unit changes one part only or if gradients are scaled."""
    found = ""
    if any(p.alone for p in parts):
        found += (
            f"; each {unit} changes only one of these parts, drawn at random: the draw must stay secret, and no "
            "amplification is claimed for it"
        )
    if any(p.scales for p in parts):
        found += (
            "; of the scaled sum: gradients are multiplied by public factors before clipping, and divided by them "
            "after the noise is added"
        )
    return found


def percent(share: float, digits: int = 4) -> str:
    """An upper bound on a share, in percent, rounded up; at most 100%."""
    return f"{rounded_up(min(100.0, 100 * share), digits)}%"


def small(value: float) -> str:
    """0.00001 as 1e-5."""
    return f"{value:g}".replace("e-0", "e-")


def labelled(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with labels; consecutive equal labels are shown once."""
    labels = ["", *(name for name, _ in lines)]
    return [
        f"  {'' if name == before else name:<12} {text}" for before, (name, text) in zip(labels, lines, strict=False)
    ]


def distinct(versions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The different records of software versions, in order."""
    return list({tuple(each.items()): each for each in versions if each}.values())


def listed(found: Mapping[str, str]) -> str:
    """Names with their versions."""
    return ", ".join(f"{name} {v}" for name, v in found.items())
