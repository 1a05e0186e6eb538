"""The vocabulary that all stages share: what is protected, what one step releases, what that costs.

Nothing here touches tensors or data. A *scheme* draws the batch, a *strategy* bounds a sum over it,
and one step is one Gaussian mechanism on that sum. `Event` is that mechanism as data: all that an
accountant needs to know, and nothing that an auditor may not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from clipwise.errors import ConfigurationError


class Adjacency(str, Enum):
    """Which two data sets a guarantee makes hard to tell apart.

    ZERO_OUT: one unit is replaced by an empty one, which is removed before anything is computed. The
    size of the data set is public. Under Poisson sampling the accounting is that of add/remove.
    ADD_REMOVE: one unit is added or removed, so the size of the data set is not public. For accounting only:
    a run under it would have to take its rate and its number of steps from elsewhere.
    REPLACE_ONE: one unit is replaced by any other; a clipped sum then moves by up to twice its bound.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"

    def __str__(self) -> str:
        return self.value


class Unit(str, Enum):
    """What the guarantee protects: one record, one mini-set of records, or all records of a user."""

    RECORD = "record"
    MINI_SET = "mini-set"
    USER = "user"

    def __str__(self) -> str:
        return self.value


class Sampling(str, Enum):
    """How a batch is drawn.

    POISSON: each unit is included independently with one probability.
    TRUNCATED_POISSON: the same, but of more units than a public limit a uniform subset of that size is kept.
    FIXED_SIZE: a uniform subset of constant size.
    PARTITION: one block or several, uniformly, of a partition fixed beforehand and independent of the data. Its
    accounting holds where each block is clipped as a whole.
    SHUFFLED: each unit once an epoch, in random order; no amplification is claimed.
    FULL: every unit in every step.
    """

    POISSON = "poisson"
    TRUNCATED_POISSON = "truncated-poisson"
    FIXED_SIZE = "fixed-size"
    PARTITION = "partition"
    SHUFFLED = "shuffled"
    FULL = "full"

    def __str__(self) -> str:
        return self.value


# The pairs for which a sensitivity and an accountant are both proven; every other pair is refused.
# The first adjacency of a scheme is its default.
SUPPORTED: Mapping[Sampling, tuple[Adjacency, ...]] = {
    Sampling.POISSON: (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE),
    Sampling.TRUNCATED_POISSON: (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE),
    Sampling.FIXED_SIZE: (Adjacency.REPLACE_ONE,),
    Sampling.PARTITION: (Adjacency.REPLACE_ONE,),
    Sampling.SHUFFLED: (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE),
    Sampling.FULL: (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE),
}


class Amplification(Enum):
    """Why a step costs less than its Gaussian mechanism.

    COIN: the unit is in the batch independently of all others, and adds nothing if not. Worst pairs: (P, Q) and
    (Q, P) of accounting/gaussian.py, which are two directions to be composed each on its own.
    DRAW: another unit stands in if it is not drawn (replace-one), and moves the release by one sensitivity at most. The
    worst pair is the subsampling operator C_p(G_{1/z}), which is symmetric: one pair that dominates both directions at
    once. In a partition a whole block stands in, so each block must be clipped as a whole.
    """

    COIN = "coin"
    DRAW = "draw"


# The pair that a step of each scheme reduces to; None for a Gaussian mechanism that every unit takes part in.
AMPLIFICATION: Mapping[Sampling, Amplification | None] = {
    Sampling.POISSON: Amplification.COIN,
    Sampling.TRUNCATED_POISSON: Amplification.COIN,
    Sampling.FIXED_SIZE: Amplification.DRAW,
    Sampling.PARTITION: Amplification.DRAW,
    Sampling.SHUFFLED: None,
    Sampling.FULL: None,
}


def require_supported(sampling: Sampling, adjacency: Adjacency) -> None:
    """Refuse a scheme and an adjacency that have no proven accounting together."""
    if adjacency not in SUPPORTED[sampling]:
        allowed = " or ".join(repr(str(a)) for a in SUPPORTED[sampling])
        raise ConfigurationError(
            f"adjacency={str(adjacency)!r} is not supported with sampling={str(sampling)!r}: use {allowed}."
        )


@dataclass(frozen=True)
class Event:
    """One private step: a Gaussian mechanism on the sum over one sampled batch.

    Args:
        sampling: the scheme that drew the batch.
        adjacency: the neighbouring relation that `noise_multiplier` is relative to.
        unit: what is protected.
        noise_multiplier: z, the noise's standard deviation over the sensitivity *under this adjacency*
            (2C, not C, for a clipped sum under replace-one). With several parts it is the effective
            one of the joint mechanism. 0 means no noise and an infinite epsilon.
        sample_rate: the probability that a given unit is in the batch. For SHUFFLED it is 1 / period;
            for FULL it is 1.
        period: for SHUFFLED, the number of steps in which each unit takes part exactly once; else 1.
        excess: for TRUNCATED_POISSON, the probability that more units are drawn than the limit; else 0.
    """

    sampling: Sampling
    adjacency: Adjacency
    unit: Unit
    noise_multiplier: float
    sample_rate: float
    period: int = 1
    excess: float = 0.0

    def __post_init__(self) -> None:
        require_supported(self.sampling, self.adjacency)
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigurationError("noise_multiplier must be a finite number that is not negative.")
        if not 0 < self.sample_rate <= 1:
            raise ConfigurationError("sample_rate must lie in (0, 1].")
        if self.period < 1 or (self.period > 1 and self.sampling is not Sampling.SHUFFLED):
            raise ConfigurationError("period must be at least 1, and is 1 unless sampling is 'shuffled'.")
        if self.sampling is Sampling.FULL and self.sample_rate != 1:
            raise ConfigurationError("sampling='full' takes every unit: its sample_rate is 1.")
        if not 0 <= self.excess <= 1:
            raise ConfigurationError("excess is a probability: it must lie in [0, 1].")
        if self.excess > 0 and self.sampling is not Sampling.TRUNCATED_POISSON:
            raise ConfigurationError("excess must be 0 unless sampling is 'truncated-poisson'.")

    def to_dict(self) -> dict[str, Any]:
        """The event in plain types, for the ledger, a checkpoint or a statement; an excess of 0 is left out."""
        return {
            key: str(v) if isinstance(v, Enum) else v
            for key, v in asdict(self).items()
            if key != "excess" or v > 0
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """The inverse of `to_dict`."""
        return cls(
            sampling=Sampling(data["sampling"]),
            adjacency=Adjacency(data["adjacency"]),
            unit=Unit(data["unit"]),
            noise_multiplier=float(data["noise_multiplier"]),
            sample_rate=float(data["sample_rate"]),
            period=int(data["period"]),
            excess=float(data.get("excess", 0.0)),
        )


@dataclass(frozen=True)
class Entry:
    """`count` releases of one event in a row, by one run.

    Two entries are never merged across a change of key or of the run: a shuffled epoch that is broken off and begun
    again takes its units part twice, so each entry of a shuffled event counts ceil(count / period) passes.

    Args:
        event: the kind of step.
        count: how many of them.
        run: the tag of the run that made them; "" if nobody said. It does not take part in comparisons, since a
            release costs the same whichever run made it.
    """

    event: Event
    count: int
    run: str = field(default="", compare=False)


@dataclass(frozen=True)
class Part:
    """One piece of a step's release.

    Args:
        name: how messages and the statement call it.
        parameters: the names of the model's parameters that it holds.
        sensitivity: L2 sensitivity of the *sum* (before division), under the step's adjacency.
        noise_std: standard deviation of the noise on each coordinate of the sum.
        scales: one for each parameter, if any: its sum is multiplied by this before the noise, and what comes
            out is divided by it. Sensitivity and noise are those of the scaled sum.
        alone: a unit that moves this part moves none of the others that are marked so.
        grid: the step of the grid that the sum is rounded to before the noise, which lies on it too; 0: on none.
            The sensitivity is then that of the rounded sum.
    """

    name: str
    parameters: tuple[str, ...]
    sensitivity: float
    noise_std: float
    scales: tuple[float, ...] = ()
    alone: bool = False
    grid: float = 0.0


def effective_multiplier(parts: Sequence[Part]) -> float:
    """z of the joint mechanism: all parts come from one sample, so (sum_k (S_k / s_k)^2)^(-1/2).

    Of the parts that a unit moves alone, only the one counts that it moves most.
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
        roots = [math.sqrt(max(d, 1)) for d in dimensions]  # a part without coordinates needs no care
        total = sum(s * root for s, root in zip(sensitivities, roots, strict=True))
        return [
            noise_multiplier * math.sqrt(s / root * total)
            for s, root in zip(sensitivities, roots, strict=True)
        ]
    raise ConfigurationError(f"split={split!r} is not known: use 'equal' or 'optimal'.")


def rounded_up(epsilon: float) -> str:
    """To four digits, never below what was spent."""
    text = f"{epsilon:.4g}"
    if float(text) >= epsilon:
        return text
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return f"{float(text) + unit:.4g}"


@dataclass(frozen=True)
class Spent:
    """What a run has cost so far: the answer of `Private.spent()`.

    `reproducible` marks a run whose noise and samples come from a given seed: no guarantee is claimed for it, and the
    figures are those that it would have with a key from the operating system.

    `assumption` says what the figure rests on besides the accountant: where several runs share a ledger, most
    accountants need all of them to be fixed before the first release.
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
