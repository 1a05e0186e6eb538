"""Checks of a single run: the size and independence of its noise, its key, and its batches.

Statistical checks report a false finding with probability below 1e-9.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from clipwise.audit.recorder import Release, entries
from clipwise.audit.report import Finding
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Part, Sampling

CHANCE = 1e-9
_PREFIX = 8  # compared numbers of a stream: two streams that agree this far are the same
_ALIKE = 0.9999  # cosine; eight independent normals exceed it with probability 1e-13


def of_noise(releases: Sequence[Release]) -> Iterator[Finding]:
    """Check that every sum has the declared noise, and that the parts together match the charged event."""
    for number, release in enumerate(releases, start=1):
        z, joint = release.event.noise_multiplier, _joint_multiplier(release.parts)
        if z > 0 and joint < z * (1 - 1e-6):
            yield Finding(
                number,
                "joint",
                f"the parts together have a noise multiplier of {joint:.4g} and {z:.4g} is charged: K parts of one "
                "sample need sqrt(K) times the noise each.",
            )
            break
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for release in releases:
        noise = release.noise()
        for part in release.parts:
            for name, _ in entries(part) if part.noise_std > 0 else ():
                square = float((noise[name] / part.noise_std).square().sum())
                for what in (f"{name!r}", f"part {part.name!r}"):
                    squares[what] = squares.get(what, 0.0) + square
                    counts[what] = counts.get(what, 0) + noise[name].numel()
    for what, square in squares.items():
        if counts[what] and stats.chi2.cdf(square, counts[what]) < CHANCE:
            share = math.sqrt(square / counts[what])
            yield Finding(0, "noise", f"the noise on {what} has {share:.3g} of the declared standard deviation.")


def of_streams(releases: Sequence[Release]) -> Iterator[Finding]:
    """Check that no noise is used twice. The same noise on two sums reveals their difference."""
    names, rows = [], []
    for number, release in enumerate(releases, start=1):
        noise = release.noise()
        for part in release.parts:
            drawn = [_in_memory(noise[name], release.values[name]) for name, _ in entries(part)]
            values = torch.cat(drawn)[:_PREFIX]
            if part.noise_std > 0 and len(values) == _PREFIX:
                names.append((number, part.name))
                rows.append((values / values.norm()).numpy(force=True))
    if len(rows) < 2:
        return
    cosines = np.abs(np.tril(np.stack(rows) @ np.stack(rows).T, -1))
    later, earlier = np.unravel_index(int(cosines.argmax()), cosines.shape)
    if cosines[later, earlier] > _ALIKE:
        (a, one), (b, other) = names[earlier], names[later]
        yield Finding(
            b,
            "key",
            f"the noise on part {other!r} is that of step {a} on part {one!r}: a key was used twice, and the "
            "difference of two releases has no noise.",
        )


def _in_memory(noise: Tensor, released: Tensor) -> Tensor:
    """Numbers in the order of the memory of the released tensor, in which they were drawn."""
    return noise.permute(sorted(range(noise.dim()), key=released.stride, reverse=True)).flatten()


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
        yield Finding(
            0,
            "sampling",
            f"every record takes part exactly {taken[0]} times in {T} steps, as in shuffled epochs, and Poisson "
            "sampling is charged: there is no amplification.",
        )
    if len({len(d) for d in draws}) == 1 and _chance_of_one_value(dataset_size, rate, T) < CHANCE:
        yield Finding(
            0, "sampling", f"all of {T} batches have one size, and Poisson sampling is charged: their size is random."
        )


def of_secrets(state: Mapping[str, Any], key: NoiseKey, steps: int) -> Iterator[Finding]:
    """Check that `state_dict()` contains no secret of the run, as bytes or as hex, of any step."""
    file = io.BytesIO()
    torch.save(_without_graphs(state), file)
    content = file.getvalue()
    for step in range(steps + 1):
        secret = key.secret_bytes()
        if secret in content or secret.hex().encode() in content:
            yield Finding(
                step,
                "key",
                "the secret of the noise is in what state_dict() returns: a reader of it can remove the noise.",
            )
            return
        key.advance()


def _without_graphs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {k: _without_graphs(v) for k, v in value.items()}
    return value


def _joint_multiplier(parts: Sequence[Part]) -> float:
    """(sum_k (S_k / s_k)^2)^(-1/2), computed independently; the largest if a unit is in only one part."""
    moved = [p for p in parts if p.sensitivity]
    squares = [(p.sensitivity / p.noise_std) ** 2 if p.noise_std > 0 else math.inf for p in moved]
    together = sum(square for square, p in zip(squares, moved, strict=True) if not p.alone)
    apart = max((square for square, p in zip(squares, moved, strict=True) if p.alone), default=0.0)
    return 1 / math.sqrt(together + apart) if together + apart > 0 else math.inf


def _chance_of_one_value(trials: int, rate: float, copies: int) -> float:
    return float(np.sum(stats.binom.pmf(np.arange(trials + 1), trials, rate) ** copies))
