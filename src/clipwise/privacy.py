"""Types shared by all modules: adjacency, unit, sampling, events and their parts.

A sampling scheme draws the batch, a clipping strategy bounds a sum over it, and one step is a Gaussian mechanism on
that sum. `Event` holds the parameters of this mechanism, all of them public. Nothing here touches tensors or data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from clipwise.deprecation import VALUES, RenamedMembers
from clipwise.errors import ConfigurationError


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Adjacency(_Text):
    """The neighbouring relation between data sets.

    ZERO_OUT: one unit is replaced by an empty one, which contributes nothing. The size of the data set is public.
    Under Poisson sampling the accounting is that of add/remove.
    ADD_REMOVE: one unit is added or removed, so the size of the data set is not public. For accounting only: a run
    would need a sampling rate and a number of steps that do not depend on the size.
    REPLACE_ONE: one unit is replaced by any other. A clipped sum then changes by up to twice the clipping norm.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


class Unit(_Text, metaclass=RenamedMembers):
    """The unit of privacy: one record, one microbatch of records, or all records of one user."""

    RECORD = "record"
    MICROBATCH = "microbatch"
    USER = "user"

    @staticmethod
    def renamed_members() -> Mapping[str, str]:
        """Deprecated names."""
        return {"MINI_SET": "MICROBATCH"}


class Sampling(_Text):
    """How a batch is drawn.

    POISSON: each unit is included independently with the same probability.
    TRUNCATED_POISSON: as POISSON, but a batch above a public limit is reduced to a uniform subset of that size.
    FIXED_SIZE: a uniform subset of constant size.
    PARTITION: one or more uniformly drawn blocks of a partition that is fixed in advance, independently of the data.
    The accounting requires that each block is clipped as a whole.
    SHUFFLED: each unit once per epoch, in random order; no amplification is claimed.
    FULL: every unit in every step.
    """

    POISSON = "poisson"
    TRUNCATED_POISSON = "truncated-poisson"
    FIXED_SIZE = "fixed-size"
    PARTITION = "partition"
    SHUFFLED = "shuffled"
    FULL = "full"


# The pairs with a proven sensitivity and a proven accountant. The first adjacency is the default of the scheme.
SUPPORTED: Mapping[Sampling, tuple[Adjacency, ...]] = {
    Sampling.POISSON: (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE),
    Sampling.TRUNCATED_POISSON: (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE),
    Sampling.FIXED_SIZE: (Adjacency.REPLACE_ONE,),
    Sampling.PARTITION: (Adjacency.REPLACE_ONE,),
    Sampling.SHUFFLED: (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE),
    Sampling.FULL: (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE),
}


class Amplification(Enum):
    """The kind of privacy amplification by subsampling.

    POISSON: the unit is included independently of all others, and contributes nothing if it is not included. The
    dominating pairs are (P, Q) and (Q, P) of accounting/gaussian.py; each direction is composed separately.
    WITHOUT_REPLACEMENT: if the unit is not drawn, another unit takes its place (replace-one) and changes the release by
    at most one sensitivity. The dominating pair is the subsampling operator C_p(G_{1/z}), which is symmetric and covers
    both directions. In a partition a whole block takes the place, so each block must be clipped as a whole.
    """

    POISSON = "poisson"
    WITHOUT_REPLACEMENT = "without-replacement"


# The dominating pair of a step of each scheme; None for a Gaussian mechanism without amplification.
AMPLIFICATION: Mapping[Sampling, Amplification | None] = {
    Sampling.POISSON: Amplification.POISSON,
    Sampling.TRUNCATED_POISSON: Amplification.POISSON,
    Sampling.FIXED_SIZE: Amplification.WITHOUT_REPLACEMENT,
    Sampling.PARTITION: Amplification.WITHOUT_REPLACEMENT,
    Sampling.SHUFFLED: None,
    Sampling.FULL: None,
}


def require_supported(sampling: Sampling, adjacency: Adjacency) -> None:
    """Raise if there is no proven accounting for this scheme and this adjacency."""
    if adjacency not in SUPPORTED[sampling]:
        allowed = " or ".join(repr(str(a)) for a in SUPPORTED[sampling])
        raise ConfigurationError(
            f"adjacency={str(adjacency)!r} is not supported with sampling={str(sampling)!r}: use {allowed}."
        )


# What a release is for; "" is a step of a training.
PURPOSES = ("", "preparation", "evaluation")


@dataclass(frozen=True)
class Event:
    """One private step: a Gaussian mechanism on the sum over one sampled batch.

    Args:
        sampling: the scheme that drew the batch.
        adjacency: the neighbouring relation that `noise_multiplier` refers to.
        unit: the unit of privacy.
        noise_multiplier: z, the standard deviation of the noise over the sensitivity *under this adjacency* (2C, not
            C, for a clipped sum under replace-one). With several parts it is that of the joint mechanism. 0 means no
            noise and an infinite epsilon.
        sample_rate: the probability that a given unit is in the batch; 1 / period for SHUFFLED, 1 for FULL.
        period: for SHUFFLED, the number of steps in which each unit is used exactly once; else 1.
        excess: a probability with which the step is not this Gaussian mechanism; else 0. For TRUNCATED_POISSON, that
            more units are drawn than the limit. For FULL, that the release of one data set shows a value that only
            this unit has (a stability threshold, `recipes/counts.py`).
        purpose: what is released if it is no step of a training: "preparation" (noised counts that an encoding is made
            from) or "evaluation" (noised figures of accuracy); else "". It does not change the cost.
    """

    sampling: Sampling
    adjacency: Adjacency
    unit: Unit
    noise_multiplier: float
    sample_rate: float
    period: int = 1
    excess: float = 0.0
    purpose: str = ""

    def __post_init__(self) -> None:
        require_supported(self.sampling, self.adjacency)
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigurationError("noise_multiplier must be a finite number of at least 0.")
        if not 0 < self.sample_rate <= 1:
            raise ConfigurationError("sample_rate must lie in (0, 1].")
        if self.period < 1 or (self.period > 1 and self.sampling is not Sampling.SHUFFLED):
            raise ConfigurationError("period must be at least 1, and is 1 unless sampling is 'shuffled'.")
        if self.sampling is Sampling.FULL and self.sample_rate != 1:
            raise ConfigurationError("sampling='full' uses every unit in every step: sample_rate must be 1.")
        if self.purpose not in PURPOSES:
            raise ConfigurationError(f"purpose must be one of {', '.join(map(repr, PURPOSES))}, not {self.purpose!r}.")
        if not 0 <= self.excess <= 1:
            raise ConfigurationError("excess is a probability and must lie in [0, 1].")
        if self.excess > 0 and self.sampling not in (Sampling.TRUNCATED_POISSON, Sampling.FULL):
            raise ConfigurationError("excess must be 0 unless sampling is 'truncated-poisson' or 'full'.")
        if self.excess > 0 and self.sampling is Sampling.FULL and self.adjacency is not Adjacency.ZERO_OUT:
            raise ConfigurationError("excess with sampling='full' needs adjacency='zero-out'.")

    def to_dict(self) -> dict[str, Any]:
        """The event in JSON types; an excess of 0 and an empty purpose are omitted."""
        return {
            key: str(v) if isinstance(v, Enum) else v
            for key, v in asdict(self).items()
            if key not in ("excess", "purpose") or v
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """The inverse of `to_dict`."""
        return cls(
            sampling=Sampling(data["sampling"]),
            adjacency=Adjacency(data["adjacency"]),
            unit=Unit(VALUES.get(data["unit"], data["unit"])),
            noise_multiplier=float(data["noise_multiplier"]),
            sample_rate=float(data["sample_rate"]),
            period=int(data["period"]),
            excess=float(data.get("excess", 0.0)),
            purpose=str(data.get("purpose", "")),
        )


@dataclass(frozen=True)
class Entry:
    """`count` consecutive releases of one event by one run.

    Entries are never merged across a change of the key or of the run. A shuffled epoch that is interrupted and
    restarted uses units twice, so each entry of a shuffled event counts ceil(count / period) passes.

    Args:
        event: the kind of step.
        count: the number of steps.
        run: the tag of the run; "" if unknown. Comparisons ignore it, since the cost does not depend on the run.
    """

    event: Event
    count: int
    run: str = field(default="", compare=False)


@dataclass(frozen=True)
class Part:
    """One piece of a step's release.

    Args:
        name: the name used in messages and in the statement.
        parameters: the names of its model parameters.
        sensitivity: L2 sensitivity of the *sum* (before division), under the adjacency of the step.
        noise_std: standard deviation of the noise on each coordinate of the sum.
        scales: a factor for each parameter, or empty. The sum is multiplied by it before the noise is added, and
            divided by it afterwards. Sensitivity and noise are those of the scaled sum.
        alone: a unit that changes this part changes no other part with this mark.
        grid: the step of the grid to which the sum and the noise are rounded; 0 for no rounding. The sensitivity is
            that of the rounded sum.
    """

    name: str
    parameters: tuple[str, ...]
    sensitivity: float
    noise_std: float
    scales: tuple[float, ...] = ()
    alone: bool = False
    grid: float = 0.0


def effective_multiplier(parts: Sequence[Part]) -> float:
    """z of the joint mechanism: (sum_k (S_k / s_k)^2)^(-1/2), since all parts use the same batch.

    Among the parts marked `alone`, only the largest ratio counts.
    """
    if any(p.noise_std == 0 and p.sensitivity > 0 for p in parts):
        return 0.0
    moved = [p for p in parts if p.sensitivity > 0]
    total = sum((p.sensitivity / p.noise_std) ** 2 for p in moved if not p.alone)
    total += max(((p.sensitivity / p.noise_std) ** 2 for p in moved if p.alone), default=0.0)
    return total**-0.5 if total > 0 else math.inf


def split_noise(
    sensitivities: Sequence[float], dimensions: Sequence[int], noise_multiplier: float, split: str
) -> list[float]:
    """The standard deviation of each part such that the joint mechanism has `noise_multiplier`.

    equal:   s_k = z sqrt(K) S_k
    optimal: s_k = z sqrt( (S_k / sqrt(d_k)) sum_j S_j sqrt(d_j) ), which minimises the expected
             squared noise sum_k d_k s_k^2 subject to sum_k (S_k / s_k)^2 = z^-2.
    """
    if split == "equal":
        return [noise_multiplier * math.sqrt(len(sensitivities)) * s for s in sensitivities]
    if split == "optimal":
        roots = [math.sqrt(max(d, 1)) for d in dimensions]
        total = sum(s * root for s, root in zip(sensitivities, roots, strict=True))
        return [noise_multiplier * math.sqrt(s / root * total) for s, root in zip(sensitivities, roots, strict=True)]
    raise ConfigurationError(f"split={split!r} is not known: use 'equal' or 'optimal'.")


def rounded_up(value: float, digits: int = 4) -> str:
    """Round up to a few significant digits."""
    text = f"{value:.{digits}g}"
    if float(text) >= value:
        return text
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return f"{float(text) + unit:.{digits}g}"


@dataclass(frozen=True)
class Spent:
    """The privacy cost of a run so far, as returned by `Private.spent()`.

    `reproducible` marks a run with a user-given seed. No guarantee is claimed for it; the figures are those of the
    same run with a secret key from the operating system.

    `assumption` is an assumption of the figure besides those of the accountant: if several runs share a ledger, most
    accountants require that all of them were fixed before the first release.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    sampling: Sampling
    steps: int
    accountant: str
    reproducible: bool = False
    assumption: str = ""

    def __str__(self) -> str:
        mark = "no guarantee: seeded; with a fresh key " if self.reproducible else ""
        return (
            f"{mark}epsilon={rounded_up(self.epsilon)} at delta={self.delta:g} ({self.adjacency} of one {self.unit}, "
            f"{self.sampling} sampling, {self.steps} steps, {self.accountant})"
            + (f", {self.assumption}" if self.assumption else "")
        )
