"""Adds noise to sums and writes the released gradient, in as few passes over memory as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from clipwise.privacy import Part

BUCKET = 16 * 2**20  # noise values per draw: 64 MiB in addition to the sums

# (bucket number, size, dtype, onto, divisor) -> flat noise, or (onto + noise) / divisor.
Draw = Callable[[int, int, torch.dtype, Tensor | None, float], Tensor]
# (sizes, standard deviations) of several sums -> their flat noise.
DrawTogether = Callable[[Sequence[int], Sequence[float]], Tensor]


def buckets(sizes: Sequence[int]) -> list[int]:
    """The number of consecutive sums that share each draw of noise: many small ones, or a single large one."""
    found: list[int] = []
    left = 0
    for size in sizes:
        if not found or size > left:
            found.append(0)
            left = max(size, BUCKET)
        found[-1] += 1
        left -= size
    return found


def fit_together(parts: Sequence[Part], sums: Mapping[str, Tensor]) -> bool:
    """Whether one draw can serve several parts: standard noise on the CPU, for one bucket."""
    return (
        len(parts) > 1
        and all(part.noise_std > 0 and not part.grid and not part.scales for part in parts)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in sums.values())
        and sum(t.numel() for t in sums.values()) <= BUCKET
    )


@torch.no_grad()
def noised_together(
    parts: Sequence[Part], sums: Mapping[str, Tensor], draw: DrawTogether, divisor: float
) -> dict[str, Tensor]:
    """(sum + noise) / divisor of all parts from one draw."""
    stds = {name: part.noise_std for part in parts for name in part.parameters or (part.name,)}
    those = [sums[name] for name in stds]
    sizes = [t.numel() for t in those]
    noise = draw(sizes, list(stds.values()))
    views = [_shaped(piece, t) for piece, t in zip(torch.split(noise, sizes), those, strict=True)]
    torch._foreach_add_(views, those)
    noise.div_(divisor)
    return dict(zip(stds, views, strict=True))


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


@torch.no_grad()
def in_order_of(parameter: Tensor, total: Tensor) -> Tensor:
    """A sum in the memory order of its parameter, so that an entry gets the same noise for every memory order."""
    if total.stride() == parameter.stride():
        return total
    if _is_dense(total) and _is_dense(parameter) and _order(total) == _order(parameter):
        return total.as_strided(parameter.shape, parameter.stride())  # only strides of axes of size 1 differ
    return torch.empty_like(parameter, dtype=total.dtype).copy_(total)


def in_order(parameters: Mapping[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Bring each sum into the memory order of its parameter. Sums without a parameter do not change."""
    for name, p in parameters.items():
        sums[name] = in_order_of(p, sums[name])


@torch.no_grad()
def laid_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the dtype and memory order of its parameter.

    Fused optimizers on a CPU read the memory of both in parallel and ignore strides.
    """
    return in_order_of(parameter, gradient.to(parameter.dtype))


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
