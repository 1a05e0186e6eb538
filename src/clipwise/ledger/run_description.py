"""The public configuration of a run, as far as a privacy statement needs it.

The engine writes it to the ledger with the first release of each process of the run. It contains no data.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clipwise.deprecation import current_strategy
from clipwise.privacy import Part

PACKAGES = ("clipwise-dp", "torch", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class About:
    """The configuration of one process of a run. None means "not recorded" (older ledgers).

    Args:
        strategy: the configuration of the clipping strategy.
        public_statistics: the use of public rows in layers of the model.
        parts: the parts of a release; of the first release, if the strategy adapts.
        divisor: the public constant by which the noised sum is divided.
        arithmetic: the arithmetic of norms and sums.
        noise: "standard" or "secure".
        delta: the delta of the guarantee.
        budget: the largest epsilon allowed.
        run: the tag of the run in its ledger.
        planned: the number of steps for which the noise was calibrated, or the number of steps given.
        noise_multiplier: that of the joint mechanism.
        event: the event of the steps, if it was fixed before a release that prepares the data (planned_run.py).
        seeded: whether noise and sampling use a seed given by the user.
        key: the public id of the first noise key.
        draws: the source of randomness of random layers: "key" of the run, "torch", or "seeded" (torch, seeded by the
            user).
        probed: whether the first batches were probed for losses that depend on other examples. False if the graph of
            the losses did not lead to the batch.
        planned_tests: the tests planned on the first batches, "replacement" and "collation". Never their results.
        followed_metric: whether a scheduler set the learning rate from a metric.
        penalised: whether a penalty was added to the gradient after the noise.
        versions: the versions of the software.
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
    event: Mapping[str, Any] | None = None
    seeded: bool | None = None
    key: str | None = None
    draws: str | None = None
    probed: bool | None = None
    planned_tests: tuple[str, ...] | None = None
    followed_metric: bool | None = None
    penalised: bool | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The description in JSON types."""
        content: dict[str, Any] = plain(asdict(self))
        return content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> About:
        """The inverse of `to_dict`; ignores unknown keys, and treats missing ones as not recorded."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        if isinstance(known.get("strategy"), Mapping):
            known["strategy"] = current_strategy(known["strategy"])
        if known.get("parts") is not None:
            known["parts"] = tuple(_part(part) for part in known["parts"])
        if known.get("planned_tests") is not None:
            known["planned_tests"] = tuple(known["planned_tests"])
        return cls(**known)


def _part(data: Mapping[str, Any]) -> Part:
    tuples = {name: tuple(data.get(name, ())) for name in ("parameters", "scales")}
    return Part(**{name: data[name] for name in Part.__dataclass_fields__ if name in data} | tuples)


def versions() -> dict[str, str]:
    """The versions of the installed software."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def plain(value: Any) -> Any:
    """Convert a value to JSON types; infinity and NaN become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)


@cache  # the lookup takes longer than a small step
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
