"""Bounds of convolutions (window geometry, operator norms, the rule) and of pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.layers.clipped.linear import AnyConvolution, Convolution, window_counts
from clipwise.lipschitz.linear import AffineRule
from clipwise.lipschitz.matrix_norms import EPS, Spectral, frobenius_norms, spectral_bounds
from clipwise.lipschitz.rule import Call, Effort, Measurements, Norms, Reach, Rule, fixed_gain_rule

_SLACK = 2.0**-26  # for sums of up to 2^26 numbers in float64
_LARGEST_TORUS = 2**23  # numbers in the transfer matrices of a torus bound: 128 MiB
_TORUS_ITERATIONS = 5


@dataclass(frozen=True)
class WindowGeometry:
    """The geometry of a kernel's windows on an image, per dimension. `before`: zero padding; `out`: window count."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    out: tuple[int, ...]

    @cached_property
    def positions(self) -> int:
        return math.prod(self.out)

    @cached_property
    def cover(self) -> int:
        """The largest number of windows with one pixel; at most ceil(k / (s / gcd(s, dilation))) per dimension."""
        return math.prod(cover for _, cover, _ in self._counts())

    @cached_property
    def taps(self) -> int:
        """The largest number of image pixels in one window."""
        return math.prod(taps for _, _, taps in self._counts())

    def _counts(self) -> list[tuple[int, int, int]]:
        each = zip(self.size, self.kernel, self.stride, self.dilation, self.before, self.out, strict=True)
        return [window_counts(n, k, s, d, before, windows=out) for n, k, s, d, before, out in each]


def operator_from(norms: Mapping[str, float], windows: WindowGeometry) -> float:
    """An upper bound on the operator norm of the convolution, the smallest of:

    - gathering: |windows of x|^2 <= cover |x|^2, so sqrt(cover) |W|, W as c_out x (c_in k);
    - scattering: an output sums at most `taps` parts, so sqrt(taps) |W|, W as (c_out k) x c_in, whose norm is at most
      |W|_F. It is only computed if there are more inputs than outputs;
    - sqrt(|.|_1 |.|_inf) of the operator, from the sums of its kernel;
    - with effort "tight": the exact norm on a torus large enough that no window wraps around.
    """
    found = [
        math.sqrt(windows.cover) * norms["weight"],
        math.sqrt(windows.taps) * norms.get("scattering", norms["frobenius"]),
        math.sqrt(norms["most into an output"] * norms["most out of an input"]),
    ]
    finite = all(map(math.isfinite, found))  # min() may ignore NaN
    return min(*found, norms.get("torus", math.inf)) * (1 + _SLACK) if finite else math.inf


def torus_bound(weight: Tensor, groups: int, windows: WindowGeometry) -> Tensor:
    """An upper bound on the norm from the Fourier transform of the operator; infinite if that is too large to form.

    On a torus of N >= n + d (k - 1) pixels per dimension no window wraps around, so a convolution with zero padding is
    a part of the circular one. With stride s it keeps every s-th output, which folds S = prod s frequencies onto each
    other: with N a multiple of s its norm is that of [K(w_1) ... K(w_S)] / sqrt(S).
    """
    torus = tuple(
        -(-(n + d * (k - 1)) // s) * s
        for n, k, s, d in zip(windows.size, windows.kernel, windows.stride, windows.dilation, strict=True)
    )
    w = weight.detach().double()
    if math.prod(torus) * w.shape[0] * w.shape[1] > _LARGEST_TORUS:
        return torch.tensor(math.inf, dtype=torch.float64, device=w.device)
    spread = w.new_zeros((*w.shape[:2], *torus))
    taps = tuple(slice(0, d * (k - 1) + 1, d) for k, d in zip(windows.kernel, windows.dilation, strict=True))
    everywhere = (slice(None), slice(None))
    spread[everywhere + taps] = w
    dims = range(2, spread.ndim)
    transfer = torch.fft.fftn(spread, dim=tuple(dims))
    # A frequency is w = v + j N / s: v indexes the blocks that fold onto each other, j the members of a block.
    apart = [n for total, s in zip(torus, windows.stride, strict=True) for n in (s, total // s)]
    transfer = transfer.reshape(groups, w.shape[0] // groups, w.shape[1], *apart)
    members = [3 + 2 * i for i in range(len(torus))]
    blocks = [4 + 2 * i for i in range(len(torus))]
    folded = transfer.permute(0, *blocks, 1, 2, *members).reshape(
        -1, w.shape[0] // groups, w.shape[1] * math.prod(windows.stride)
    )
    bounds = spectral_bounds(folded, _TORUS_ITERATIONS) / math.sqrt(math.prod(windows.stride))
    # The error of an FFT is below c log2(N) u times the norm of the spectrum, |K|_F = sqrt(N) |W|_F.
    rounding = 32 * math.log2(2 * math.prod(torus)) * EPS * math.sqrt(math.prod(torus))
    return bounds.amax() + rounding * frobenius_norms(w.flatten(1))


class ConvolutionRule(AffineRule):
    """A convolution with zero padding over P windows; see `WindowGeometry` for `cover`, `operator_from` for its norm.

    dW = sum_p g_p window_p^T, so |dW|_F <= |g| |windows|_F <= |g| min(sqrt(cover) |x|, sqrt(P) max_p |window_p|);
    db = sum_p g_p, so |db| <= sqrt(P) |g|.
    """

    module: AnyConvolution

    def __init__(self, call: Call) -> None:
        module: AnyConvolution = call.target
        (shape,), self.out = call.shapes, call.out
        if module.padding_mode != "zeros":
            raise call.refusal(f"padding_mode={module.padding_mode!r} has no bound here: use 'zeros'")
        if len(shape) != len(module.kernel_size) + 1:
            raise call.refusal("its input has no batch dimension: give input_shape without the batch")
        self.module, self.rounding, self.groups = module, call.rounding, module.groups
        place = Convolution(module)
        before = tuple(before for before, _ in place.around)
        geometry = place.kernel, place.stride, place.dilation, before
        self.windows = WindowGeometry(tuple(shape[1:]), *geometry, tuple(call.out[1:]))
        self._taps = self.windows.taps
        self._channels = module.in_channels // module.groups
        self.gathered = math.sqrt(self.windows.cover)

    def measured(self, effort: Effort) -> Measurements:
        """The norms of every affine map, and those that `operator_from` needs besides."""
        weight = self.module.weight.detach().double()
        per_group = weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1)
        sizes = per_group.abs()
        found = super().measured(effort) | {
            "most into an output": sizes.sum((2, 3)).amax(),
            "most out of an input": sizes.sum(1).sum(2).amax(),
        }
        if per_group.shape[1] < per_group.shape[2] or effort == "tight":
            # With more inputs than outputs this form of W has fewer rows, so noise in it has a smaller norm.
            found["scattering"] = Spectral(per_group.transpose(2, 3).flatten(1, 2))
        return found | ({"torus": torus_bound(weight, self.groups, self.windows)} if effort == "tight" else {})

    def joined(self, found: Norms) -> dict[str, float]:
        own = {name: found[name] for name in ("weight", "frobenius", "rows", "bias")}
        return own | {"operator": operator_from(found, self.windows)}

    def allowed(self, limit: float) -> dict[str, float]:
        return super().allowed(limit) | {"operator": limit * self.gathered}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        window = self._window(x)
        slack = 1 + self.rounding.of_sum(self._channels * self._taps)
        each = (norms["weight"] + (slack - 1) * norms["frobenius"]) * window  # the output of one window
        bias = norms["bias"] * (1 + self.rounding.of_elements)
        root = math.sqrt(self.windows.positions)
        # `each` is the bound for one group; all groups together are at most sqrt(groups) times it.
        apart = math.sqrt(self.groups)
        return Reach.of(
            self.out,
            norm=min(self._gain(norms) * x.norm, root * apart * each) + root * bias,
            entry=norms["rows"] * slack * window + bias,
        )

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        (x,) = reaches
        positions = self.windows.positions
        slack = 1 + self.rounding.of_sum(positions)
        # The windows of a group contain only its channels, so `cover` holds for all groups together.
        windows = min(self.gathered * x.norm, math.sqrt(positions) * self._window(x))
        return self._with_bias(slack * windows, slack * math.sqrt(positions))

    def _window(self, x: Reach) -> float:
        """The largest norm of one window's entries in one group of channels."""
        return min(x.norm, math.sqrt(self._taps * self._channels) * x.entry)

    def _gain(self, norms: Norms) -> float:
        terms = self._taps * max(self._channels, self.module.out_channels // self.groups)
        rounding = self.rounding.of_sum(terms) * self.gathered * norms["frobenius"]
        return norms["operator"] + rounding


MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_MAX = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
ADAPTIVE_AVERAGE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def averaging_rule(call: Call, norm: float, entry: float = 1.0) -> Rule:
    """The rule of a linear map with a known norm and no parameters; an entry grows by at most `entry`."""
    slack = 1 + call.rounding.of_sum(math.prod(call.shapes[0]))
    return fixed_gain_rule(call.out, norm * slack, entry * slack)


def average_rule(call: Call) -> Rule:
    """Average pooling is a Kronecker product of one matrix per dimension, and the norms multiply.

    This also holds for `count_include_pad=False` and `ceil_mode`: the divisor of a window is a product over dimensions.
    """
    module, sizes = call.target, _image(call)
    each = (_tuple(given, sizes) for given in (module.kernel_size, module.stride, module.padding))
    matrices = []
    override = getattr(module, "divisor_override", None)
    for n, k, s, p in zip(sizes, *each, strict=True):
        pixels = torch.eye(n, dtype=torch.float64).unsqueeze(1)
        # With divisor_override: sums, which padding does not change, divided once at the end.
        kept = module.count_include_pad if override is None else True
        pooled = F.avg_pool1d(pixels, k, s, p, module.ceil_mode, kept).squeeze(1)
        matrices.append((pooled > 0).double() if override is not None else pooled)
    norm = _norm(matrices)
    if override is None:
        return averaging_rule(call, norm)
    held = math.prod(float(m.sum(0).amax()) for m in matrices)
    return averaging_rule(call, norm / abs(override), held / abs(override))


def adaptive_rule(call: Call) -> Rule:
    """Average or max pooling with the windows of the given output sizes."""
    matrices = [
        F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(1), o).squeeze(1)
        for n, o in zip(_image(call), call.out[1:], strict=True)
    ]
    if isinstance(call.target, ADAPTIVE_AVERAGE):
        return averaging_rule(call, _norm(matrices))
    return _maximum(call, math.prod(int((m > 0).sum(1).amax()) for m in matrices))


def maximum_rule(call: Call) -> Rule:
    """Max pooling, from the largest number of windows that contain one pixel."""
    module, sizes = call.target, _image(call)
    kernel, stride, padding, dilation = (
        _tuple(given, sizes) for given in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    if any(d > n for n, d in zip(sizes, dilation, strict=True)):
        raise call.refusal("its dilation is larger than the image, so a window can be empty: use a smaller dilation")
    return _maximum(call, WindowGeometry(tuple(sizes), kernel, stride, dilation, padding, call.out[1:]).cover)


def _maximum(call: Call, windows: int) -> Rule:
    """The maximum of each window. A pixel in m windows has m copies and receives m gradients: sqrt(m)."""
    if getattr(call.target, "return_indices", False):
        raise call.refusal("return_indices=True has no bound: leave it out")
    return fixed_gain_rule(call.out, math.sqrt(windows) * (1 + call.rounding.of_sum(windows)))


def _norm(matrices: list[Tensor]) -> float:
    return math.prod(float(spectral_bounds(m)) for m in matrices)


def _image(call: Call) -> Sequence[int]:
    """All dimensions except channels. Without channels torch would use the batch as channels."""
    shape = call.shapes[0]
    if len(shape) != int(type(call.target).__name__[-2]) + 1:
        begin = "begin with nn.Unflatten(1, (1, -1)), or add one to the data set"
        raise call.refusal(f"examples of shape {tuple(shape)} have no channel dimension: {begin}")
    return shape[1:]


def _tuple(value: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    return (value,) * len(sizes) if isinstance(value, int) else tuple(value)
