"""Scale and shift gradients against float64, for the strides of common models."""

import pytest
import torch

from clipwise.kernels import affine
from tests.kernels.ways import both

LAYER_WAYS = both(affine.layer_norm_sums_in_torch, affine.layer_norm_sums)
GROUP_WAYS = both(affine.group_norm_sums_in_torch, affine.group_norm_sums)
SUM_WAYS = both(affine.position_sums_in_torch, affine.position_sums)
SHAPES = [(2, 197, 100), (3, 5, 7), (1, 1024, 70), (2, 1, 130), (4, 3, 1)]


def assert_close(found, true, terms):
    """`terms` are the summed absolute values: rounding errors scale with them."""
    assert found.dtype == torch.float32 and found.shape == true.shape
    assert ((found - true).abs() <= 1e-5 * terms).all()


@pytest.mark.parametrize("way", LAYER_WAYS)
@pytest.mark.parametrize("has_mean", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("B,T,d", SHAPES)
def test_layer_norm(way, has_mean, batch_first, B, T, d):
    torch.manual_seed(d)
    g, x = torch.randn(B, T, d), torch.randn(B, T, d) if batch_first else torch.randn(T, B, d).transpose(0, 1)
    mean, rstd = torch.randn(B, T) if has_mean else None, torch.rand(B, T) + 0.5
    scale, shift = way(g, x, mean, rstd)
    terms = g.double() * (x.double() - (mean.double()[..., None] if has_mean else 0)) * rstd.double()[..., None]
    assert_close(scale, terms.sum(1), terms.abs().sum(1))
    assert_close(shift, g.double().sum(1), g.double().abs().sum(1))


@pytest.mark.parametrize("way", GROUP_WAYS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("C,G,side", [(12, 4, 9), (6, 6, 1), (70, 1, 5), (2, 2, 40)])
def test_group_norm(way, memory_format, C, G, side):
    torch.manual_seed(C)
    g, x = (torch.randn(3, C, side, side).to(memory_format=memory_format).flatten(2) for _ in range(2))
    mean, rstd = torch.randn(3, G), torch.rand(3, G) + 0.5
    scale, shift = way(g, x, mean, rstd)
    mean_C1, rstd_C1 = (stat.double().repeat_interleave(C // G, 1)[..., None] for stat in (mean, rstd))
    terms = g.double() * (x.double() - mean_C1) * rstd_C1
    assert_close(scale, terms.sum(2), terms.abs().sum(2))
    assert_close(shift, g.double().sum(2), g.double().abs().sum(2))


@pytest.mark.parametrize("way", SUM_WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("B,T,p", SHAPES)
def test_position_sums(way, dtype, B, T, p):
    g = torch.randn(B, p, T, dtype=dtype).mT
    assert_close(way(g), g.double().sum(1), g.double().abs().sum(1))


@pytest.mark.parametrize("way", LAYER_WAYS)
def test_float64_stays_float64(way):
    g, x, rstd = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double(), torch.rand(2, 3).double()
    scale, shift = way(g, x, None, rstd)
    assert torch.equal(scale, (g * (x * rstd[..., None])).sum(1)) and torch.equal(shift, g.sum(1))
