"""What a run says about itself: all that a privacy statement needs and the releases do not tell.

The engine writes it into the ledger with the first release of every sitting. It is public configuration, holds
nothing of the data, and charges nothing.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clipwise.clipping.base import recorded_strategy
from clipwise.privacy import Event, Part, Sampling, Unit

PACKAGES = ("clipwise-dp", "torch", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class About:
    """One sitting of a run. None is "not recorded": older ledgers say less.

    Args:
        strategy: how what one unit can do is bounded, and what was learned from releases.
        public_statistics: what public rows are used for in the model's own layers.
        parts: what a release holds; of the first one, if the strategy adapts.
        divisor: the public constant that the noised sum is divided by.
        arithmetic: in which the sums were formed.
        noise: its kind, "standard" or "secure".
        delta: of the guarantee that the run was made for.
        budget: the epsilon that it may not pass.
        run: the tag of the run in its ledger.
        planned: for how many steps its noise was calibrated, or how many it was said to take.
        noise_multiplier: of all parts together, as it was given or calibrated.
        seeded: whether noise and sampling come from a given seed.
        key: the public id of the noise key that it began with.
        draws: where random layers drew from: "key" of the run, "torch", or "seeded": torch with a seed set by hand.
        probed: whether the first batches were examined for losses that depend on other examples.
        planned_tests: which tests that run the loss again were planned on the first batches, "replacement" and
            "collation". Never what they found.
        followed_metric: whether a scheduler that is fed a metric has set the learning rate.
        penalised: whether a penalty was added to the gradient after the noise.
        versions: of the software that it ran on.
    """

    strategy: Mapping[str, Any] | None = None
    public_statistics: Mapping[str, Any] | None = None
    parts: tuple[Part, ...] | None = None
    divisor: float | None = None
    arithmetic: str | None = None
    noise: str | None = None
    delta: float | None = None
    budget: float | None = None
    run: str | None = None
    planned: int | None = None
    noise_multiplier: float | None = None
    seeded: bool | None = None
    key: str | None = None
    draws: str | None = None
    probed: bool | None = None
    planned_tests: tuple[str, ...] | None = None
    followed_metric: bool | None = None
    penalised: bool | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """In plain types that JSON knows."""
        content: dict[str, Any] = plain(asdict(self))
        return content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> About:
        """The inverse of `to_dict`; what is missing or of another version counts as not recorded."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        if known.get("parts") is not None:
            known["parts"] = tuple(_part(part) for part in known["parts"])
        if known.get("planned_tests") is not None:
            known["planned_tests"] = tuple(known["planned_tests"])
        return cls(**known)


def _part(data: Mapping[str, Any]) -> Part:
    tuples = {name: tuple(data.get(name, ())) for name in ("parameters", "scales")}
    return Part(**{name: data[name] for name in Part.__dataclass_fields__ if name in data} | tuples)


# Older versions also ran this, and accounted for it as if each block were clipped as a whole.
UNDERSTATED = (
    "releases with sampling='partition' whose blocks are not known to have been clipped as a whole: their strategy was "
    "not Batch, or users were protected, or it is not recorded. Older versions of clipwise understated the cost of "
    "that, so no figure is given. The true cost of T such steps at rate p and noise multiplier z is delta(epsilon) = "
    "sum_k Binomial(k; T, p) delta_Gauss(epsilon; mu = sqrt(k) / z)"
)


def is_understated(event: Event, strategy: Mapping[str, Any] | None) -> bool:
    """Whether an event is a step of a partition whose blocks are not known to have been clipped as a whole.

    Args:
        event: the step.
        strategy: how its run clipped, as it described itself; None if that is not recorded.
    """
    if event.sampling is not Sampling.PARTITION:
        return False
    return not (recorded_strategy(strategy).clips_whole_blocks and event.unit is Unit.RECORD)


def versions() -> dict[str, str]:
    """The software that is running now."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def plain(value: Any) -> Any:
    """A value in the types of JSON, which has no infinity and no NaN: they become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)


@cache  # to look it up takes longer than a small step
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
