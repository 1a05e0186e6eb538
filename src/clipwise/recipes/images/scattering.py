"""A fixed scattering transform of images: oriented wavelets, moduli and averages. Nothing in it is learned.

A linear model of these features learns faster under noise than a network that learns its own filters (Tramèr and
Boneh 2021). kymatio has such a transform, but its release 0.3.0 does not import with scipy 1.15 or later.

    S0 = average(x),    S1 = average |x * psi|,    S2 = average ||x * psi_1| * psi_2|

with Morlet wavelets psi of 8 orientations and 2 scales, the second wavelet at the larger scale. The larger scale is the
same small kernel on an image of half the size. Averages have Gaussian windows on a grid of at most 8 x 8 places.

B: images, C: colours, H, W: height and width, G: places on a side of the grid, F: 81 features of a place,
L: orientations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ORIENTATIONS = 8
FEATURES = 1 + 2 * ORIENTATIONS + ORIENTATIONS**2  # of a colour at a place
_RADIUS = 4  # of a wavelet's kernel, in pixels
_WIDTH, _SLANT, _FREQUENCY = 0.8, 0.5, 0.75 * math.pi
_PIXELS_PER_PLACE, _MOST_PLACES = 4, 8
_GROUP = 3  # features that are normalized together
_CHUNK = 256  # images at a time
NORM = 10.0  # of the features of an image


def grid_side(image_size: int) -> int:
    """Places on a side of the grid of averages."""
    return min(_MOST_PLACES, max(1, math.ceil(image_size / _PIXELS_PER_PLACE)))


def scattering_size(channels: int, image_size: int) -> int:
    """The number of features of an image."""
    return channels * FEATURES * grid_side(image_size) ** 2


@torch.no_grad()
def scattering(x_BCHW: Tensor) -> Tensor:
    """Features of square images, [B, C F G G] in bfloat16. The features of an image depend on it alone."""
    if len(x_BCHW) == 0:
        return x_BCHW.new_zeros(0, scattering_size(x_BCHW.shape[1], x_BCHW.shape[-1]), dtype=torch.bfloat16)
    return torch.cat([_features(chunk) for chunk in torch.split(x_BCHW, _CHUNK)])


def _features(x_BCHW: Tensor) -> Tensor:
    B, C, H, _ = x_BCHW.shape
    x_B1HW = x_BCHW.reshape(B * C, 1, H, H).float()
    larger = _half(x_B1HW)
    waves = _moduli(x_B1HW)
    parts = [x_B1HW, waves, _moduli(larger), _moduli(_half(waves))]
    s_BFGG = torch.cat([_averages(part, grid_side(H)) for part in parts], 1)
    return (_normalized(s_BFGG).reshape(B, -1) / math.sqrt(C)).bfloat16()


def _normalized(s_BFGG: Tensor) -> Tensor:
    """Square roots, which make small features count, and then mean 0 and variance 1 in each group of an image.

    All images have about the same norm, `NORM`, so clipping treats them alike.
    """
    roots = s_BFGG.sign() * s_BFGG.abs().sqrt()
    normal = F.group_norm(roots, FEATURES // _GROUP, eps=1e-4)
    return normal * (NORM / math.sqrt(s_BFGG[0].numel()))


def _moduli(x_BFHW: Tensor) -> Tensor:
    """|x * psi| for all orientations, [B, F L, H, W]."""
    B, K, H, W = x_BFHW.shape
    waves = F.conv2d(x_BFHW.reshape(B * K, 1, H, W), _wavelets().to(x_BFHW.device), padding=_RADIUS)
    real, imaginary = waves.chunk(2, 1)
    return torch.hypot(real, imaginary).reshape(B, K * ORIENTATIONS, H, W)


def _wavelets() -> Tensor:
    """Morlet kernels, [2 L, 1, 2 R + 1, 2 R + 1]: the real parts, then the imaginary parts. Each has mean 0."""
    along = torch.arange(-_RADIUS, _RADIUS + 1, dtype=torch.float64)
    y, x = torch.meshgrid(along, along, indexing="ij")
    kernels = []
    for step in range(ORIENTATIONS):
        angle = math.pi * step / ORIENTATIONS
        u = math.cos(angle) * x + math.sin(angle) * y
        v = _SLANT * (math.cos(angle) * y - math.sin(angle) * x)
        window = torch.exp(-(u**2 + v**2) / (2 * _WIDTH**2))
        wave = window * torch.exp(1j * _FREQUENCY * u)
        wave = wave - window * (wave.sum() / window.sum())
        kernels.append(wave * _SLANT / (2 * math.pi * _WIDTH**2))
    psi = torch.stack(kernels)
    return torch.cat([psi.real, psi.imag]).float().unsqueeze(1)


def _half(x_BFHW: Tensor) -> Tensor:
    """Blurred and of half the size, rounded up."""
    side = x_BFHW.shape[-1]
    return _averages(x_BFHW, math.ceil(side / 2))


def _averages(x_BFHW: Tensor, places: int) -> Tensor:
    """Gaussian averages at places x places points."""
    window = _windows(x_BFHW.shape[-1], places).to(x_BFHW.device)
    return window @ x_BFHW @ window.T


def _windows(pixels: int, places: int) -> Tensor:
    """[places, pixels]: a Gaussian window in each row, with sum 1."""
    stride = pixels / places
    centre = (torch.arange(places) + 0.5) * stride - 0.5
    distance = torch.arange(pixels)[None, :] - centre[:, None]
    window = torch.exp(-(distance**2) / (2 * (0.4 * stride) ** 2))
    return window / window.sum(1, keepdim=True)
