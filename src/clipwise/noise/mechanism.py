"""From the sums of all parts to what is released: each part's noise, drawn from the key of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from clipwise.gradients.real_views import complex_view, real_view
from clipwise.noise.gaussian import gaussian, gaussian_in_pieces
from clipwise.noise.key import NoiseKey
from clipwise.noise.release import Draw, buckets, fit_together, noised, noised_together, scales_of
from clipwise.noise.secure import noised_on_grid, rounded_gaussian
from clipwise.privacy import Part

# From a part's number, its place among the devices of the part, its standard deviation and the device to its draws.
DrawOf = Callable[[int, int, float, torch.device], Draw]


def noised_sums(
    total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey
) -> dict[str, Tensor]:
    """(sum + noise) / L of each sum, with L the expected size: for what is drawn is secret. Sums are written over.

    Noise falls on the real and on the imaginary parts of a complex sum. Small parts on a CPU share one draw.
    """
    are_complex = [name for name, t in total.items() if t.is_complex()]
    total.update({name: real_view(total[name]) for name in are_complex})
    if fit_together(parts, total):
        draw_together = partial(gaussian_in_pieces, key.derive("noise/together"))
        total.update(noised_together(parts, total, draw_together, divisor))
    else:
        noised_by_part(total, parts, divisor, partial(_draw_from, key), key)
    total.update({name: complex_view(total[name]) for name in are_complex})
    return total


def noised_by_part(
    total: dict[str, Tensor],
    parts: Sequence[Part],
    divisor: float,
    draw_of: DrawOf,
    key: NoiseKey | None = None,
) -> None:
    """Put (sum + noise) / L in the place of each sum.

    A part's noise comes device by device and bucket by bucket, in the order of its parameters; a part without any is a
    vector beside the gradient. Every draw has a label of its own, so no two share a stream. A scaled parameter is
    (m sum + noise) / (m L). Secure noise lies on a grid, and so does the sum that it is put onto; it needs the key.
    """
    for number, part in enumerate(parts):
        entries = part.parameters or (part.name,)
        if part.noise_std == 0:
            total.update({name: total[name] / divisor for name in entries})
            continue
        by_device: dict[torch.device, list[str]] = {}
        for name in entries:
            by_device.setdefault(total[name].device, []).append(name)
        for place, (device, names) in enumerate(by_device.items()):
            scales = scales_of(part, names)
            sums = [total.pop(n) for n in names]
            if part.grid:
                assert key is not None
                steps = partial(_draw_steps, key, part.noise_std / part.grid, f"secure/{number}/{place}")
                released = noised_on_grid(sums, steps, divisor, part.grid, scales)
            else:
                released = noised(sums, draw_of(number, place, part.noise_std, device), divisor, scales)
            total.update(zip(names, released, strict=True))


def noise_labels(part: int, sums: Sequence[Tensor]) -> list[str]:
    """Of the draws for these sums of a part, which are on one device."""
    return [noise_label(part, 0, bucket) for bucket in range(len(buckets([t.numel() for t in sums])))]


def noise_label(part: int, place: int, bucket: int) -> str:
    """What the key of a draw of plain noise is derived for."""
    return f"noise/{part}/{place}/{bucket}"


def _draw_from(key: NoiseKey, part: int, place: int, std: float, device: torch.device) -> Draw:
    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        secret = key.derive(noise_label(part, place, bucket))
        return gaussian(secret, size, std, device=device, dtype=dtype, onto=onto, divisor=divisor)

    return draw


def _draw_steps(key: NoiseKey, ratio: float, label: str, bucket: int, size: int) -> Tensor:
    """Secure noise, in steps of the grid."""
    return rounded_gaussian(key.derive(f"{label}/{bucket}"), size, ratio)
