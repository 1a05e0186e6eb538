"""From the sums of all parts to what is released: each part's noise, drawn from the key of the step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from clipwise.gradients.real_views import complex_view, real_view
from clipwise.noise.gaussian import NoiseKey, gaussian, gaussian_in_pieces
from clipwise.noise.release import fit_together, noised, noised_together, scales_of
from clipwise.noise.secure import noised_on_grid, rounded_gaussian
from clipwise.privacy import Part


def noised_sums(
    total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey
) -> dict[str, Tensor]:
    """(sum + noise) / L of each sum. Noise falls on the real and on the imaginary parts of a complex one."""
    are_complex = [name for name, t in total.items() if t.is_complex()]
    total.update({name: real_view(total[name]) for name in are_complex})
    total = _noised_sums(total, parts, divisor, key)
    total.update({name: complex_view(total[name]) for name in are_complex})
    return total


def _noised_sums(
    total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey
) -> dict[str, Tensor]:
    """(sum + noise) / L, with L the expected size: for what is drawn is secret. Sums are written over.

    A part's noise comes device by device and bucket by bucket, in the order of its parameters; a part without any is a
    number. Every draw has a label of its own, so no two share a stream; small parts on a CPU share one draw. A scaled
    parameter is (m sum + noise) / (m L).
    Secure noise lies on a grid, and so does the sum that it is put onto.
    """
    if fit_together(parts, total):
        total.update(noised_together(parts, total, partial(_draw_together, key), divisor))
        return total
    for number, part in enumerate(parts):
        entries = part.parameters or (part.name,)
        if part.noise_std == 0:
            total.update({name: total[name].div_(divisor) for name in entries})
            continue
        by_device: dict[torch.device, list[str]] = {}
        for name in entries:
            by_device.setdefault(total[name].device, []).append(name)
        for place, (device, names) in enumerate(by_device.items()):
            scales = scales_of(part, names)
            sums = [total.pop(n) for n in names]
            here = f"{number}/{place}"
            if part.grid:
                steps = partial(_draw_steps, key, part.noise_std / part.grid, f"secure/{here}")
                released = noised_on_grid(sums, steps, divisor, part.grid, scales)
            else:
                draw = partial(_draw, key, part.noise_std, f"noise/{here}", device)
                released = noised(sums, draw, divisor, scales)
            total.update(zip(names, released, strict=True))
    return total


def _draw(
    key: NoiseKey,
    std: float,
    label: str,
    device: torch.device,
    bucket: int,
    size: int,
    dtype: torch.dtype,
    onto: Tensor | None,
    divisor: float,
) -> Tensor:
    secret = key.derive(f"{label}/{bucket}")
    return gaussian(secret, size, std, device=device, dtype=dtype, onto=onto, divisor=divisor)


def _draw_together(key: NoiseKey, sizes: Sequence[int], stds: Sequence[float]) -> Tensor:
    """Plain noise of all parts, one after another in one stream, on the CPU."""
    return gaussian_in_pieces(key.derive("noise/together"), sizes, stds)


def _draw_steps(key: NoiseKey, ratio: float, label: str, bucket: int, size: int) -> Tensor:
    """Secure noise, in steps of the grid."""
    return rounded_gaussian(key.derive(f"{label}/{bucket}"), size, ratio)
