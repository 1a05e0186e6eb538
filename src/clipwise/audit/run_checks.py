"""Checks of one run: the size of its noise, its independence, its key, and what was drawn.

One run is enough for these. Where chance plays a part, a finding has a probability below 1e-9 if all is well.
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
_PREFIX = 8  # numbers of a stream that are compared: two that agree so far are one
_ALIKE = 0.9999  # cosine; of eight independent normals it is larger with probability 1e-13


def of_noise(releases: Sequence[Release]) -> Iterator[Finding]:
    """Is every sum noised as its part declares, and do the parts come to the event that is charged?"""
    for number, release in enumerate(releases, start=1):
        z, joint = release.event.noise_multiplier, _joint_multiplier(release.parts)
        if z > 0 and joint < z * (1 - 1e-6):
            yield Finding(
                number,
                "joint",
                f"the parts come to a noise multiplier of {joint:.4g} together and {z:.4g} is charged: K parts of one "
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
            yield Finding(
                0, "noise", f"the noise on {what} has {share:.3g} of the standard deviation that is declared."
            )


def of_streams(releases: Sequence[Release]) -> Iterator[Finding]:
    """Does any noise serve twice? The same noise on two sums reveals their difference."""
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
            f"the noise on part {other!r} is that of step {a} on part {one!r}: a key served twice, and the difference "
            "of two releases has no noise.",
        )


def _in_memory(noise: Tensor, released: Tensor) -> Tensor:
    """Numbers in the order in which they were drawn: that of the memory of what was released."""
    return noise.permute(sorted(range(noise.dim()), key=released.stride, reverse=True)).flatten()


def of_draws(releases: Sequence[Release], dataset_size: int) -> Iterator[Finding]:
    """Could draws such as these come from the scheme that is charged? Asked of Poisson sampling."""
    draws = [r.drawn for r in releases if r.event.sampling is Sampling.POISSON]
    if not draws or not any(draws):
        return
    rate = releases[0].event.sample_rate
    T, total = len(draws), sum(map(len, draws))
    if stats.binom.sf(total - 1, T * dataset_size, rate) < CHANCE:
        yield Finding(
            0, "sampling", f"records are drawn more often than at the rate {rate:.4g} that is charged."
        )
    taken = np.bincount(np.concatenate([np.asarray(d, np.int64) for d in draws]), minlength=dataset_size)
    if len(set(taken.tolist())) == 1 and _chance_of_one_value(T, rate, dataset_size) < CHANCE:
        yield Finding(
            0,
            "sampling",
            f"every record takes part exactly {taken[0]} times in {T} steps, as in shuffled epochs, and Poisson "
            "sampling is charged: nothing is amplified.",
        )
    if len({len(d) for d in draws}) == 1 and _chance_of_one_value(dataset_size, rate, T) < CHANCE:
        yield Finding(
            0,
            "sampling",
            f"all of {T} batches have one size, and Poisson sampling is charged: their size is random.",
        )


def of_secrets(state: Mapping[str, Any], key: NoiseKey, steps: int) -> Iterator[Finding]:
    """Is a secret of the run in what may be published? Looked for as bytes and as hex, at every step."""
    file = io.BytesIO()
    torch.save(_without_graphs(state), file)
    content = file.getvalue()
    for step in range(steps + 1):
        secret = key.secret_bytes()
        if secret in content or secret.hex().encode() in content:
            yield Finding(
                step,
                "key",
                "the secret of the noise is in what state_dict() returns: who reads it can take the noise off.",
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
    """(sum_k (S_k / s_k)^2)^(-1/2), written down a second time; of parts that a unit moves alone the largest counts."""
    moved = [p for p in parts if p.sensitivity]
    squares = [(p.sensitivity / p.noise_std) ** 2 if p.noise_std > 0 else math.inf for p in moved]
    together = sum(square for square, p in zip(squares, moved, strict=True) if not p.alone)
    apart = max((square for square, p in zip(squares, moved, strict=True) if p.alone), default=0.0)
    return 1 / math.sqrt(together + apart) if together + apart > 0 else math.inf


def _chance_of_one_value(trials: int, rate: float, copies: int) -> float:
    """The probability that so many independent binomial numbers are all equal."""
    return float(np.sum(stats.binom.pmf(np.arange(trials + 1), trials, rate) ** copies))
