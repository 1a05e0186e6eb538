"""Noise that ends at 5.8 standard deviations, as float32 normals from 24-bit uniforms do."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from clipwise.noise import gaussian as noise
from clipwise.noise import mechanism
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from tests.audit.bug import Bug

# Found by trying seeds in turn: the first draw of this one reaches 6.22 standard deviations.
FAR_OUT, FURTHEST = 8630, 6.2


def plant(patch: pytest.MonkeyPatch) -> None:
    def cut(key: bytes, size: int, std: float, **options: Any) -> Any:
        return gaussian(key, size, std, **options).clamp(-5.8 * std, 5.8 * std)

    def add_cut(key: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
        draws = cut(key, sum(t.numel() for t in sums), 1.0).split([t.numel() for t in sums])
        for total, std, drawn in zip(sums, stds, draws, strict=True):
            total.add_(std * drawn.view_as(total)).div_(divisor)

    patch.setattr(mechanism, "add_gaussian", add_cut)
    patch.setattr(noise, "gaussian", cut)


def reaches_far_out() -> None:
    key = NoiseKey.from_seed(FAR_OUT, b"tail").derive("noise/0")
    assert float(noise.gaussian(key, 1 << 15, 2.0).abs().max()) > FURTHEST * 2.0


BUG = Bug("a noise tail cut at 5.8 sigma", plant, ("deterministic test",), deterministic=reaches_far_out)
