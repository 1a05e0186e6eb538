"""The Gaussian mechanism: adds the noise of each part, drawn from the key of the step, to its sums."""

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

# (part number, index of the device within the part, standard deviation, device) -> draws.
DrawOf = Callable[[int, int, float, torch.device], Draw]


def noised_sums(total: dict[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey) -> dict[str, Tensor]:
    """(sum + noise) / L of each sum. L is the expected batch size; the realised one is secret. Overwrites the sums.

    Complex sums get noise on their real and imaginary parts. Small parts on a CPU share one draw.
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
    total: dict[str, Tensor], parts: Sequence[Part], divisor: float, draw_of: DrawOf, key: NoiseKey | None = None
) -> None:
    """Replace each sum by (sum + noise) / L.

    The noise of a part is drawn per device and per bucket, in the order of its parameters. A part without parameters is
    a released vector other than the gradient. Every draw has its own label, so no two share a stream. A parameter with
    scale m is (m sum + noise) / (m L). Secure noise needs the key; both the sum and its noise are on a grid.
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
            scales = scales_of(part, names) if part.scales else []
            sums = [total.pop(n) for n in names]
            if part.grid:
                assert key is not None
                steps = partial(_draw_steps, key, part.noise_std / part.grid, number, place)
                released = noised_on_grid(sums, steps, divisor, part.grid, scales)
            else:
                released = noised(sums, draw_of(number, place, part.noise_std, device), divisor, scales)
            total.update(zip(names, released, strict=True))


def noise_labels(part: int, sums: Sequence[Tensor]) -> list[str]:
    """The labels of the draws for these sums of a part, which are on one device."""
    return [noise_label(part, 0, bucket) for bucket in range(len(buckets([t.numel() for t in sums])))]


def noise_label(part: int, place: int, bucket: int) -> str:
    """The label of the key of a draw of standard noise."""
    return f"noise/{part}/{place}/{bucket}"


def secure_label(part: int, place: int, bucket: int) -> str:
    """The label of the key of a draw of secure noise."""
    return f"secure/{part}/{place}/{bucket}"


def _draw_from(key: NoiseKey, part: int, place: int, std: float, device: torch.device) -> Draw:
    def draw(bucket: int, size: int, dtype: torch.dtype, onto: Tensor | None, divisor: float) -> Tensor:
        secret = key.derive(noise_label(part, place, bucket))
        return gaussian(secret, size, std, device=device, dtype=dtype, onto=onto, divisor=divisor)

    return draw


def _draw_steps(key: NoiseKey, ratio: float, part: int, place: int, bucket: int, size: int) -> Tensor:
    """Secure noise, in multiples of the grid step."""
    return rounded_gaussian(key.derive(secure_label(part, place, bucket)), size, ratio)
