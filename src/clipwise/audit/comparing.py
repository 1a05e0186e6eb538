"""Two neighbouring runs, release by release: what may differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from clipwise.audit.findings import Finding
from clipwise.audit.tape import Release, entries
from clipwise.privacy import Part

_UNIT = 2.0**-24  # of float32, in which sums are added up
_ROUNDING = 1e-5  # of a sum, as the strategies state it
_SAME_NOISE = 1e-3  # of a standard deviation: the noise of one key, found back from rounded values


def compare(ours: Sequence[Release], theirs: Sequence[Release]) -> Iterator[Finding]:
    """What a unit moved that it may not move, in a run and its replayed neighbour."""
    if len(ours) != len(theirs):
        yield Finding(
            0,
            "control flow",
            f"one data set makes {len(ours)} releases and its neighbour {len(theirs)}: how many steps there are "
            "must not depend on the data.",
        )
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        found = [*_control_flow(number, one, other), *_states(number, one.state, other.state)]
        yield from found
        if found:  # what follows would only say so again
            return
        yield from _movements(number, one, other)
        yield from _noise(number, one, other)


def movement(one: Release, other: Release) -> float:
    """How far one unit moved a release, in units of its noise: sqrt(sum_k (|difference_k| / s_k)^2)."""
    return math.hypot(*(_over(d, part.noise_std) for part, d in _differences(one, other)))


def allowed(release: Release) -> float:
    """The most that the event of a release says: 1 / z."""
    z = release.event.noise_multiplier
    return 1 / z if z > 0 else math.inf


def _control_flow(number: int, one: Release, other: Release) -> Iterator[Finding]:
    for name, a, b in (
        ("event", one.event, other.event),
        ("parts", one.parts, other.parts),
        ("divisor", one.divisor, other.divisor),
        ("released values", sorted(one.sums), sorted(other.sums)),
    ):
        if a != b:
            yield Finding(
                number,
                "control flow",
                f"the {name} of neighbouring runs differ although both saw the same releases: something else that was "
                "learned from the data decides about them.",
            )


def _states(number: int, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Finding]:
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not same(one[name], other[name]):
            yield Finding(
                number,
                "state",
                f"{name!r} differs between neighbouring runs although both saw the same releases: data reached it past "
                "the noise. Keep no statistics of private data, and change parameters only by what was released.",
            )


def compare_ends(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The same of what is left when the runs are over."""
    yield from _states(0, one, other)


def _movements(number: int, one: Release, other: Release) -> Iterator[Finding]:
    slack = 1 + _ROUNDING + _UNIT * max(len(one.drawn), len(other.drawn), 1)
    for part, moved in _differences(one, other):
        if not moved <= part.sensitivity * slack:  # not finite counts as too much
            yield Finding(
                number,
                "sensitivity",
                f"one unit moves the sum of part {part.name!r} by {moved / part.sensitivity:.4g} times its declared "
                "sensitivity.",
            )
    joint = movement(one, other)
    if not joint <= allowed(one) * slack:
        yield Finding(
            number,
            "joint",
            f"one unit moves all parts together by {joint:.4g} standard deviations, and the event that is charged "
            f"(noise multiplier {one.event.noise_multiplier:.4g}) allows {allowed(one):.4g}.",
        )


def _noise(number: int, one: Release, other: Release) -> Iterator[Finding]:
    """Both runs have the same key, so what was added must be the same: no scale of it may follow the data."""
    theirs = other.noise()
    stds = {name: part.noise_std for part in one.parts for name, _ in entries(part)}
    for name, mine in one.noise().items():
        # What was released is rounded to its own precision.
        rounding = (
            16 * _UNIT * max(float(one.sums[name].abs().max()), float(other.sums[name].abs().max()), 0.0)
        )
        if mine.numel() and float((mine - theirs[name]).abs().max()) > _SAME_NOISE * stds[name] + rounding:
            yield Finding(
                number,
                "divisor",
                f"with the same key the noise on {name!r} differs between neighbours: the noise, or what the sum is "
                "divided by, depends on the data (on the number drawn, for instance).",
            )


def _differences(one: Release, other: Release) -> Iterator[tuple[Part, float]]:
    for part in one.parts:
        squares = sum(
            float((m * (one.sums[name].double() - other.sums[name].double())).square().sum())
            for name, m in entries(part)
        )
        yield part, math.sqrt(squares) if math.isfinite(squares) else math.inf


def _over(moved: float, std: float) -> float:
    return moved / std if std > 0 else (math.inf if moved > 0 else 0.0)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, where a NaN is the same as a NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
