"""The geometry of a convolution, and its weight gradients.

Legend: N rows, B examples (b of them) with k rows each, c and p channels, T positions of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.kernels import patches as kernel_patches


@dataclass(frozen=True)
class Geometry:
    """The shapes and settings of a convolution, with one entry for each image axis.

    Args:
        weight: the weight's shape, [p, c / groups, *kernel] (transposed: [c, p / groups, *kernel]).
        stride, padding, dilation, groups, transposed, output_padding: as in torch.
    """

    weight: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def kernel(self) -> torch.Size:
        """The size of the kernel along each axis."""
        return self.weight[2:]

    def weight_gradient(self, x_Nc: Tensor, g_Np: Tensor, side_by_side: int = 1) -> Tensor:
        """Summed over the rows: [p, c / groups, *kernel], for each of `side_by_side` grouped convolutions."""
        weight = x_Nc.new_empty((side_by_side * self.weight[0], *self.weight[1:]))
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g_Np, x_Nc, weight, None, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding or [0] * len(self.kernel), side_by_side * self.groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient

    def weight_gradients(self, x_bk: Tensor, g_bk: Tensor) -> Tensor:
        """One gradient per example, [b, *weight], from *one* convolution with the examples as groups.

        Inputs [b, k, c, ...] become channels [k, b*c, ...] in b*groups groups. The k rows of an example are the batch
        of that convolution, which sums over them.
        """
        b = len(x_bk)
        x_kbc, g_kbp = (_examples_to_channels(t) for t in (x_bk, g_bk))
        return self.weight_gradient(x_kbc, g_kbp, b).view(b, *self.weight)

    def windows(self, x_bk: Tensor) -> Tensor:
        """[b, k, c, ...] -> [b, T, c * kernel]: the input window of each output position (without groups)."""
        n, seen = len(self.kernel), self._seen(x_bk)
        seen = seen.permute(0, 2, *range(3 + n, 3 + 2 * n), 1, *range(3, 3 + n))
        return seen.reshape(len(x_bk), seen.shape[1 : 2 + n].numel(), seen.shape[2 + n :].numel()).mT

    def patches(self, x_bk: Tensor) -> Tensor:
        """The same in the order [b, T, kernel * c]."""
        b, k = x_bk.shape[:2]
        x_Nc = x_bk.flatten(0, 1)
        if x_Nc.dim() == 4 and x_Nc.stride(1) != 1:
            x_Nc = x_Nc.contiguous(memory_format=torch.channels_last)
        places = tuple(self.places(axis, size) for axis, size in enumerate(x_Nc.shape[2:]))
        if len(places) == 2 and kernel_patches.fits(x_Nc):
            two = (self.kernel, self.stride, self.padding, self.dilation, places)
            seen = kernel_patches.patches(x_Nc, *((each[0], each[1]) for each in two))
            return seen.view(b, k * seen.shape[1], seen.shape[2])
        n, view = len(self.kernel), self._seen(x_bk)
        view = view.permute(0, 1, *range(3, 3 + 2 * n), 2)
        return view.reshape(b, view.shape[1 : 2 + n].numel(), view.shape[2 + n :].numel())

    def _seen(self, x_bk: Tensor) -> Tensor:
        """A view [b, k, c, *positions, *kernel] of the padded input."""
        sides = [size for pad in reversed(self.padding) for size in (pad, pad)]
        seen = F.pad(x_bk, sides) if any(sides) else x_bk
        for d, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            seen = seen.unfold(3 + d, gap * (size - 1) + 1, step)[..., ::gap]
        return seen

    def shifts(self, axis: int) -> dict[int, list[int]]:
        """The kernel's offsets along an axis, relative to a position, as {remainder: quotients} modulo the stride."""
        found: dict[int, list[int]] = {}
        for o in range(self.kernel[axis]):
            place = o * self.dilation[axis] - self.padding[axis]
            quotient, rest = divmod(place, self.stride[axis])
            found.setdefault(rest, []).append(quotient)
        return found

    def places(self, axis: int, size: int) -> int:
        """The number of output positions along an axis, for an input of `size`."""
        seen = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - seen) // self.stride[axis] + 1


def positions(g_bk: Tensor) -> Tensor:
    """[b, k, p, ...] -> [b, T, p]."""
    return g_bk.transpose(1, 2).flatten(2).mT


def _examples_to_channels(t_bk: Tensor) -> Tensor:
    """[b, k, C, ...] -> [k, b*C, ...].

    Any stride counts as contiguous along an axis of size 1, but some kernels then assume another memory format.
    """
    t = t_bk.transpose(0, 1).flatten(1, 2)
    plain = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == plain else t.clone(memory_format=torch.contiguous_format)
