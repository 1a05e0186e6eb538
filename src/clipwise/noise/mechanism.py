"""The Gaussian mechanism: adds the noise of each part, drawn from the key of the step, to its sums.

Sums are overwritten, and a bucket of them shares one draw, so that a release takes few passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from clipwise.gradients.real_views import complex_view, real_view
from clipwise.noise.gaussian import BUCKET, add_gaussian, buckets, gaussian
from clipwise.noise.key import NoiseKey
from clipwise.noise.secure import noised_on_grid, rounded_gaussian
from clipwise.privacy import Part

# (bucket number, size, dtype, onto, divisor) -> flat noise, or (onto + noise) / divisor.
Draw = Callable[[int, int, torch.dtype, Tensor | None, float], Tensor]
# (part number, index of the device within the part, standard deviation, device) -> draws.
DrawOf = Callable[[int, int, float, torch.device], Draw]


def noised_sums(
    total: dict[str, Tensor],
    parts: Sequence[Part],
    divisor: float,
    key: NoiseKey,
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """(sum + noise) / L of each sum. L is the expected batch size; the realised one is secret. Overwrites the sums.

    Sums are first brought into the memory order of `parameters`. Complex sums get noise on their real and imaginary
    parts. On a CPU the sums themselves are changed, in one pass over memory, and small parts share one draw.
    """
    for name, p in parameters.items():
        total[name] = in_order_of(p, total[name])
    are_complex = [name for name, t in total.items() if t.is_complex()]
    total.update({name: real_view(total[name]) for name in are_complex})
    if not _noised_in_place(total, parts, divisor, key):
        noised_per_part(total, parts, divisor, partial(_draw_from, key), key)
    total.update({name: complex_view(total[name]) for name in are_complex})
    return total


def noised_per_part(
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


TOGETHER = "noise/together"  # the label of the draw that several parts share


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


def _noised_in_place(total: Mapping[str, Tensor], parts: Sequence[Part], divisor: float, key: NoiseKey) -> bool:
    """Replace the content of each sum, if all get standard noise on the CPU. Returns False for other sums."""
    one = next(iter(total.values())).dtype
    if not _have_plain_noise(parts) or one not in (torch.float32, torch.float64):
        return False
    if not all(t.device.type == "cpu" and t.dtype == one and _is_dense(t) for t in total.values()):
        return False
    if fit_together(parts, total):
        stds = {name: part.noise_std for part in parts for name in part.parameters or (part.name,)}
        add_gaussian(key.derive(TOGETHER), [total[name] for name in stds], list(stds.values()), divisor)
        return True
    for number, part in enumerate(parts):
        left = [total[name] for name in part.parameters or (part.name,)]
        for bucket, count in enumerate(buckets([t.numel() for t in left])):
            sums, left = left[:count], left[count:]
            add_gaussian(key.derive(noise_label(number, 0, bucket)), sums, [part.noise_std] * count, divisor)
    return True


def fit_together(parts: Sequence[Part], sums: Mapping[str, Tensor]) -> bool:
    """Whether one draw can serve several parts: standard noise on the CPU, for one bucket."""
    return (
        len(parts) > 1
        and _have_plain_noise(parts)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in sums.values())
        and sum(t.numel() for t in sums.values()) <= BUCKET
    )


def _have_plain_noise(parts: Sequence[Part]) -> bool:
    return all(part.noise_std > 0 and not part.grid and not part.scales for part in parts)


def scales_of(part: Part, names: Sequence[str]) -> list[float]:
    """The scales of some parameters of a part that has scales."""
    by_name = dict(zip(part.parameters, part.scales, strict=True))
    return [by_name[name] for name in names]


@torch.no_grad()
def noised(sums: list[Tensor], draw: Draw, divisor: float, scales: Sequence[float] = ()) -> list[Tensor]:
    """(sum + noise) / divisor of each. Removes the sums from the list, so that their memory is freed early.

    The results of a bucket are views of the memory of its noise, each with the strides of its sum. With scales m each
    is (m sum + noise) / (m divisor).
    """
    if scales:
        torch._foreach_mul_(sums, list(scales))
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in sums) else torch.float32
    found: list[Tensor] = []
    for number, count in enumerate(buckets([t.numel() for t in sums])):
        bucket = [sums.pop(0) for _ in range(count)]
        # A single large sum needs one pass over memory, not three.
        is_alone = count == 1 and bucket[0].dtype == dtype and _is_dense(bucket[0])
        alone = bucket[0].as_strided((bucket[0].numel(),), (1,)) if is_alone else None
        noise = draw(number, sum(t.numel() for t in bucket), dtype, alone, divisor)
        pieces = torch.split(noise, [t.numel() for t in bucket])
        views = [_shaped(piece, t) for piece, t in zip(pieces, bucket, strict=True)]
        if alone is None:
            torch._foreach_add_(views, bucket)
            noise.div_(divisor)
        found.extend(views)
    if scales:
        torch._foreach_div_(found, list(scales))
    return found


def in_order_of(parameter: Tensor, total: Tensor) -> Tensor:
    """A sum in the memory order of its parameter, so that an entry gets the same noise for every memory order."""
    if total.stride() == parameter.stride():
        return total
    return _reordered(parameter, total)


@torch.no_grad()
def _reordered(parameter: Tensor, total: Tensor) -> Tensor:
    if _is_dense(total) and _is_dense(parameter) and _order(total) == _order(parameter):
        return total.as_strided(parameter.shape, parameter.stride())  # only strides of axes of size 1 differ
    return torch.empty_like(parameter, dtype=total.dtype).copy_(total)


@torch.no_grad()
def laid_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the dtype and memory order of its parameter.

    Fused optimizers on a CPU read the memory of both in parallel and ignore strides.
    """
    return in_order_of(parameter, gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype))


def write_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Write `.grad` of every parameter."""
    for name, p in parameters.items():
        p.grad = laid_as(p, gradients[name])


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A flat tensor with the shape and memory order of `like`."""
    if like.is_contiguous() or not _is_dense(like):
        return flat.view_as(like)
    return flat.as_strided(like.shape, like.stride())


def _is_dense(t: Tensor) -> bool:
    """Whether its entries fill their memory without gaps, in any order of axes: channels last, transposed."""
    return t.is_contiguous() or t.permute(_by_stride(t)).is_contiguous()


def _order(t: Tensor) -> list[int]:
    """The axes from the largest stride to the smallest, without those of size 1."""
    axes = range(t.dim()) if t.is_contiguous() or not _is_dense(t) else _by_stride(t)
    return [axis for axis in axes if t.shape[axis] > 1]


def _by_stride(t: Tensor) -> list[int]:
    return sorted(range(t.dim()), key=t.stride, reverse=True)
