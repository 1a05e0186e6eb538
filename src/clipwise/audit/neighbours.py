"""Compares two neighbouring runs release by release; the second run replays the releases of the first.

A single run is checked as well: the size and independence of its noise, its key, and its batches. These statistical
checks report a false finding with probability below 1e-9.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from clipwise.audit.planted import MakeRun, Recorder, Release, entries, state_of, train
from clipwise.audit.report import Finding, NeighboursReport
from clipwise.audit.trial import CHANGES, Change, with_record
from clipwise.engine import resume
from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Part, Sampling, Unit
from clipwise.validation.arguments import whole

_UNIT = 2.0**-24  # of float32, in which sums are accumulated
_ROUNDING = 1e-5  # of a sum, as the strategies state it
_SAME_NOISE = 1e-3  # of a standard deviation, estimated from rounded noised values


def neighbours(
    make_run: MakeRun,
    dataset: Any,
    *,
    records: Sequence[int] | None = None,
    changes: Mapping[str, Change] = CHANGES,
    seed: int = 0,
) -> NeighboursReport:
    """Check on neighbouring data sets that a run releases what it declares, and nothing else.

    It makes two runs that differ in one unit. The second uses the released values of the first, so that both have
    the same parameters at every step. At every step each part of the sum may change by its declared sensitivity, and
    all parts together by 1 / z standard deviations of their noise, with z of the charged event. Events, parts,
    parameters, buffers and noise must be identical. The noise must have the declared standard deviation and be used
    once, `state_dict()` must contain no secret, and batches charged as Poisson must not look like epochs. The audit is
    cheap and deterministic for a given seed. It is a test and no proof: it finds only what the tried records reveal.

    Under zero-out the unit is left out of every batch; under replace-one the next record replaces it.

    Args:
        make_run: trains on the data set that it is given, from `make_private` to the last step. It must do the same
            each time: torch's generator is seeded before each step. Several random layers, such as dropout, draw
            different numbers if a batch has one example less, which looks like a leak: switch them off.
        dataset: records of any kind, preferably synthetic or public. 20 to 100 are enough.
        records: the units of these records are left out or replaced, one after the other. By default the last record:
            it is the last row of its batches, so random numbers drawn row by row stay the same for the other rows.
        changes: changes to the record in both data sets, made by an adversary before it is left out or replaced in one.
        seed: the seed of the keys and of torch's generator.

    Returns:
        A report: `report.require()` raises an `AuditError` that lists the deviations.
    """
    report = NeighboursReport()
    releases: list[Release] = []
    for index in (len(dataset) - 1,) if records is None else records:
        whole("records: an index", index, least=0, most=len(dataset) - 1)
        for change in changes.values():
            # Different keys for each pair: more noise gives a better estimate of its size.
            releases += _pair(report, make_run, dataset, index, change, seed + report.pairs)
    report.findings += of_noise(releases)
    return report


def _pair(
    report: NeighboursReport, make_run: MakeRun, dataset: Any, index: int, change: Change, seed: int
) -> list[Release]:
    """Compare one data set and its neighbour. Returns the releases of the first."""
    changed = with_record(dataset, index, change(dataset[index]))
    first = Recorder(seed)
    run = train(make_run, changed, first, seed)
    event = run.event
    if event.adjacency is Adjacency.REPLACE_ONE:
        if event.unit is Unit.USER:
            raise ConfigurationError("neighbours: runs that protect users are checked under zero-out only.")
        second = Recorder(seed, tape=first.releases)
        other = with_record(changed, index, dataset[(index + 1) % len(dataset)])
    else:
        users = run.users
        unit = index if users is None else next(u for u, held in enumerate(users.table()) if index in held)
        second, other = Recorder(seed, missing=(unit,), tape=first.releases), changed
    neighbour = train(make_run, other, second, seed)
    found = [*_compare(first.releases, second.releases)]
    if not found:
        found += _states(0, state_of(run.model), state_of(neighbour.model))
    if report.pairs == 0:
        found += of_streams(first.releases)
        if event.unit is Unit.RECORD:
            found += of_draws(first.releases, run.scheme.dataset_size)
        found += of_secrets(resume.state_dict(run), first.key(), len(first.releases))
        report.history = tuple(run.ledger.history())
    report.findings += [f for f in found if f not in report.findings]
    report.pairs += 1
    for one, other_release in zip(first.releases, second.releases, strict=False):
        moved = _movement(one, other_release) if one.sums.keys() == other_release.sums.keys() else 0.0
        report.steps += 1
        report.moved += moved > 0
        report.worst = max(report.worst, moved / _allowed(one))
    return first.releases


def _compare(ours: Sequence[Release], theirs: Sequence[Release]) -> Iterator[Finding]:
    """Forbidden differences between a run and its replayed neighbour."""
    if len(ours) != len(theirs):
        counts = f"one data set makes {len(ours)} releases and its neighbour {len(theirs)}"
        yield Finding(0, "control flow", f"{counts}: the number of steps must not depend on the data.")
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        found = [*_control_flow(number, one, other), *_states(number, one.state, other.state)]
        yield from found
        if found:  # later findings would repeat this one
            return
        yield from _movements(number, one, other)
        yield from _noise(number, one, other)


def _movement(one: Release, other: Release) -> float:
    """The change of a release by one unit, in units of its noise: sqrt(sum_k (|difference_k| / s_k)^2)."""
    moved = ((d, part.noise_std) for part, d in _differences(one, other))
    return math.hypot(*(d / std if std > 0 else (math.inf if d > 0 else 0.0) for d, std in moved))


def _allowed(release: Release) -> float:
    """The largest change that the event of a release allows: 1 / z."""
    z = release.event.noise_multiplier
    return 1 / z if z > 0 else math.inf


def _control_flow(number: int, one: Release, other: Release) -> Iterator[Finding]:
    reason = "although both saw the same releases: they depend on something else that was learned from the data."
    for name, a, b in (
        ("event", one.event, other.event),
        ("parts", one.parts, other.parts),
        ("divisor", one.divisor, other.divisor),
        ("released values", sorted(one.sums), sorted(other.sums)),
    ):
        if a != b:
            yield Finding(number, "control flow", f"the {name} of neighbouring runs differ {reason}")


def _states(number: int, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Finding]:
    reason = (
        "although both saw the same releases: data reached it without noise. Keep no statistics of private data, and "
        "change parameters only by released values."
    )
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not _same(one[name], other[name]):
            yield Finding(number, "state", f"{name!r} differs between neighbouring runs {reason}")


def _movements(number: int, one: Release, other: Release) -> Iterator[Finding]:
    slack = 1 + _ROUNDING + _UNIT * max(len(one.drawn), len(other.drawn), 1)
    for part, moved in _differences(one, other):
        if not moved <= part.sensitivity * slack:  # a value that is not finite exceeds the bound
            times = f"{moved / part.sensitivity:.4g} times its declared sensitivity"
            yield Finding(number, "sensitivity", f"one unit changes the sum of part {part.name!r} by {times}.")
    joint = _movement(one, other)
    if not joint <= _allowed(one) * slack:
        allowed = f"(noise multiplier {one.event.noise_multiplier:.4g}) allows {_allowed(one):.4g}"
        moved_by = f"one unit changes all parts together by {joint:.4g} standard deviations"
        yield Finding(number, "joint", f"{moved_by}, and the charged event {allowed}.")


def _noise(number: int, one: Release, other: Release) -> Iterator[Finding]:
    """Both runs have the same key, so their noise must be the same: its scale must not depend on the data."""
    theirs = other.noise()
    stds = {name: part.noise_std for part in one.parts for name, _ in entries(part)}
    for name, mine in one.noise().items():
        # Released values are rounded to their own precision.
        rounding = 16 * _UNIT * max(float(one.sums[name].abs().max()), float(other.sums[name].abs().max()), 0.0)
        if mine.numel() and float((mine - theirs[name]).abs().max()) > _SAME_NOISE * stds[name] + rounding:
            reason = "the noise, or the divisor of the sum, depends on the data (on the batch size, say)"
            yield Finding(number, "divisor", f"with the same key the noise on {name!r} differs: {reason}.")


def _differences(one: Release, other: Release) -> Iterator[tuple[Part, float]]:
    for part in one.parts:
        squares = sum(
            float((m * (one.sums[name].double() - other.sums[name].double())).square().sum())
            for name, m in entries(part)
        )
        yield part, math.sqrt(squares) if math.isfinite(squares) else math.inf


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, where NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


CHANCE = 1e-9
_PREFIX = 8  # compared numbers of a stream: two streams that agree this far are the same
_ALIKE = 0.9999  # cosine; eight independent normals exceed it with probability 1e-13


def of_noise(releases: Sequence[Release]) -> Iterator[Finding]:
    """Check that every sum has the declared noise, and that the parts together match the charged event."""
    for number, release in enumerate(releases, start=1):
        z, joint = release.event.noise_multiplier, _joint_multiplier(release.parts)
        if z > 0 and joint < z * (1 - 1e-6):
            needed = f"{z:.4g} is charged: K parts of one sample need sqrt(K) times the noise each"
            yield Finding(number, "joint", f"the parts together have a noise multiplier of {joint:.4g} and {needed}.")
            break
    squares: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for release in releases:
        noise = release.noise()
        for part in release.parts:
            for name, _ in entries(part) if part.noise_std > 0 else ():
                square = float((noise[name] / part.noise_std).square().sum())
                for what in (f"{name!r}", f"part {part.name!r}"):
                    squares[what] += square
                    counts[what] += noise[name].numel()
    for what, square in squares.items():
        if counts[what] and stats.chi2.cdf(square, counts[what]) < CHANCE:
            share = math.sqrt(square / counts[what])
            yield Finding(0, "noise", f"the noise on {what} has {share:.3g} of the declared standard deviation.")


def of_streams(releases: Sequence[Release]) -> Iterator[Finding]:
    """Check that no noise is used twice. The same noise on two sums reveals their difference."""

    def in_memory(noise: Tensor, released: Tensor) -> Tensor:
        """Numbers in the order of the memory of the released tensor, in which they were drawn."""
        return noise.permute(sorted(range(noise.dim()), key=released.stride, reverse=True)).flatten()

    names, rows = [], []
    for number, release in enumerate(releases, start=1):
        noise = release.noise()
        for part in release.parts:
            values = torch.cat([in_memory(noise[name], release.values[name]) for name, _ in entries(part)])[:_PREFIX]
            if part.noise_std > 0 and len(values) == _PREFIX:
                names.append((number, part.name))
                rows.append((values / values.norm()).numpy(force=True))
    if len(rows) < 2:
        return
    cosines = np.abs(np.tril(np.stack(rows) @ np.stack(rows).T, -1))
    later, earlier = np.unravel_index(int(cosines.argmax()), cosines.shape)
    if cosines[later, earlier] > _ALIKE:
        (a, one), (b, other) = names[earlier], names[later]
        twice = "a key was used twice, and the difference of two releases has no noise"
        yield Finding(b, "key", f"the noise on part {other!r} is that of step {a} on part {one!r}: {twice}.")


def of_draws(releases: Sequence[Release], dataset_size: int) -> Iterator[Finding]:
    """Check that the batches are plausible under the charged scheme. Only Poisson sampling is checked."""
    draws = [r.drawn for r in releases if r.event.sampling is Sampling.POISSON]
    if not draws or not any(draws):
        return
    rate = releases[0].event.sample_rate
    T, total = len(draws), sum(map(len, draws))
    if stats.binom.sf(total - 1, T * dataset_size, rate) < CHANCE:
        yield Finding(0, "sampling", f"records are drawn more often than at the charged rate {rate:.4g}.")
    taken = np.bincount(np.concatenate([np.asarray(d, np.int64) for d in draws]), minlength=dataset_size)
    if len(set(taken.tolist())) == 1 and _chance_of_one_value(T, rate, dataset_size) < CHANCE:
        epochs = f"every record takes part exactly {taken[0]} times in {T} steps, as in shuffled epochs"
        yield Finding(0, "sampling", f"{epochs}, and Poisson sampling is charged: there is no amplification.")
    if len({len(d) for d in draws}) == 1 and _chance_of_one_value(dataset_size, rate, T) < CHANCE:
        fixed = f"all of {T} batches have one size, and Poisson sampling is charged"
        yield Finding(0, "sampling", f"{fixed}: their size is random.")


def of_secrets(state: Mapping[str, Any], key: NoiseKey, steps: int) -> Iterator[Finding]:
    """Check that `state_dict()` contains no secret of the run, as bytes or as hex, of any step."""

    def without_graphs(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        return {k: without_graphs(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    file = io.BytesIO()
    torch.save(without_graphs(state), file)
    content = file.getvalue()
    for step in range(steps + 1):
        secret = key.secret_bytes()
        if secret in content or secret.hex().encode() in content:
            held = "the secret of the noise is in what state_dict() returns"
            yield Finding(step, "key", f"{held}: a reader of it can remove the noise.")
            return
        key.advance()


def _joint_multiplier(parts: Sequence[Part]) -> float:
    """(sum_k (S_k / s_k)^2)^(-1/2), computed independently; the largest if a unit is in only one part."""
    moved = [p for p in parts if p.sensitivity]
    squares = [(p.sensitivity / p.noise_std) ** 2 if p.noise_std > 0 else math.inf for p in moved]
    together = sum(square for square, p in zip(squares, moved, strict=True) if not p.alone)
    apart = max((square for square, p in zip(squares, moved, strict=True) if p.alone), default=0.0)
    return 1 / math.sqrt(together + apart) if together + apart > 0 else math.inf


def _chance_of_one_value(trials: int, rate: float, copies: int) -> float:
    return float(np.sum(stats.binom.pmf(np.arange(trials + 1), trials, rate) ** copies))
