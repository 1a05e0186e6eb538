"""Noise on the shards of sums: each rank draws the values of its entries from the stream of the whole sum.

Streams, labels and order are those of mechanism.py, so an entry gets the same noise for every sharding, and in a single
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from clipwise.noise.gaussian import BUCKET, buckets, gaussian, gaussian_in_pieces
from clipwise.noise.key import NoiseKey
from clipwise.noise.mechanism import TOGETHER, noise_label, scales_of, secure_label
from clipwise.noise.secure import noised_on_grid, rounded_gaussian
from clipwise.privacy import Part


@dataclass(frozen=True)
class Span:
    """The entries of a tensor on one rank: `length` of them along `dim`, from `start` on."""

    shape: tuple[int, ...]
    dim: int
    start: int
    length: int

    @cached_property
    def size(self) -> int:
        """The number of entries of the whole tensor."""
        return prod(self.shape)

    @cached_property
    def range(self) -> tuple[int, int] | None:
        """The first entry and the number of entries in memory order, or None if they are not consecutive."""
        if prod(self.shape[: self.dim]) != 1:
            return None
        row = prod(self.shape[self.dim + 1 :])
        return self.start * row, self.length * row

    def of(self, whole: Tensor) -> Tensor:
        """The entries of this rank."""
        return whole.narrow(self.dim, self.start, self.length)


@torch.no_grad()
def noised_shards(
    total: dict[str, Tensor], spans: Mapping[str, Span], parts: Sequence[Part], divisor: float, key: NoiseKey
) -> dict[str, Tensor]:
    """`mechanism.noised_sums` for shards of sums. A sum without a span is whole on every rank. Overwrites the sums."""
    spans = {name: spans.get(name) or _all_of(t) for name, t in total.items()}
    together = _fit_together(parts, total, spans)
    found: dict[str, Tensor] = {}
    streams = _Streams(key, spans, together, parts)
    for number, part in enumerate(parts):
        names = list(part.parameters or (part.name,))
        if part.noise_std == 0:
            found.update({name: total[name] / divisor for name in names})
            continue
        scales = dict(zip(names, scales_of(part, names), strict=True)) if part.scales else {}
        dtype = torch.float64 if any(total[name].dtype == torch.float64 for name in names) else torch.float32
        for bucket, members in enumerate(_bucketed(names, spans)):
            offset = 0
            for name in members:
                m, shard = scales.get(name, 1.0), total.pop(name)
                if part.grid:
                    noise = streams.steps(number, bucket, members, name, offset, part)
                    (found[name],) = noised_on_grid([shard], lambda *_, n=noise: n, divisor, part.grid, [m])
                else:
                    noise = streams.noise(number, bucket, name, offset, part.noise_std, shard.device, dtype)
                    found[name] = noise.view_as(shard).add_(shard.mul_(m) if scales else shard).div_(divisor)
                    if scales:
                        found[name].div_(m)
                offset += spans[name].size
    return found


class _Streams:
    """The streams of a step, read at the entries of this rank."""

    def __init__(self, key: NoiseKey, spans: Mapping[str, Span], is_together: bool, parts: Sequence[Part]) -> None:
        self._key, self._spans = key, spans
        self._rounded: tuple[str, Tensor] | None = None
        self._together: dict[str, Tensor] | None = None
        if is_together:
            stds = {name: part.noise_std for part in parts for name in part.parameters or (part.name,)}
            sizes = [spans[name].size for name in stds]
            flat = gaussian_in_pieces(key.derive(TOGETHER), sizes, list(stds.values()))
            self._together = dict(zip(stds, torch.split(flat, sizes), strict=True))

    def noise(
        self, part: int, bucket: int, name: str, offset: int, std: float, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """The noise of the entries of this rank, in the shape of the shard or flat."""
        span = self._spans[name]
        if self._together is not None:
            return span.of(self._together[name].view(span.shape)).clone(memory_format=torch.contiguous_format)
        secret = self._key.derive(noise_label(part, 0, bucket))
        if span.range is not None:
            start, size = span.range
            return gaussian(secret, size, std, device=device, dtype=dtype, start=offset + start)
        whole = gaussian(secret, span.size, std, device=device, dtype=dtype, start=offset)
        return span.of(whole.view(span.shape)).contiguous()

    def steps(self, part: int, bucket: int, members: Sequence[str], name: str, offset: int, of: Part) -> Tensor:
        """Secure noise of the entries of this rank, in grid steps. Every rank draws the whole stream of a bucket."""
        span, label = self._spans[name], secure_label(part, 0, bucket)
        if self._rounded is None or self._rounded[0] != label:
            size = sum(self._spans[n].size for n in members)
            self._rounded = label, rounded_gaussian(self._key.derive(label), size, of.noise_std / of.grid)
        whole = self._rounded[1][offset : offset + span.size]
        return span.of(whole.view(span.shape)).reshape(-1)


def _all_of(t: Tensor) -> Span:
    return Span(tuple(t.shape) or (1,), 0, 0, len(t) if t.dim() else 1)


def _bucketed(names: Sequence[str], spans: Mapping[str, Span]) -> list[list[str]]:
    left, found = list(names), []
    for count in buckets([spans[name].size for name in names]):
        found.append(left[:count])
        left = left[count:]
    return found


def _fit_together(parts: Sequence[Part], total: Mapping[str, Tensor], spans: Mapping[str, Span]) -> bool:
    """`release.fit_together` for the whole sums."""
    return (
        len(parts) > 1
        and all(part.noise_std > 0 and not part.grid and not part.scales for part in parts)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in total.values())
        and sum(span.size for span in spans.values()) <= BUCKET
    )
