"""Squared row norms are upper bounds within the rounding of float64."""

import pytest
import torch

from clipwise.kernels import squares
from tests.kernels.ways import both

WAYS = both(squares.row_squares_in_torch, squares.row_squares)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("R,n", [(1, 100_000), (300, 3), (2, 4097), (5, 256), (9, 1), (1, 20_000)])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_bounds_are_above_and_close(way, R, n, scale):
    torch.manual_seed(n)
    x = torch.randn(n, R).T * scale
    found, true = way(x), x.double().square().sum(1)
    assert found.dtype == torch.float64 and found.shape == (R,)
    # Bound and reference both round: they differ by at most n units of float64.
    assert (found >= true).all() and (found <= true * (1 + 1e-10)).all()


@pytest.mark.parametrize("way", WAYS)
def test_every_float_dtype_and_non_finite_values(way):
    for dtype in (torch.float16, torch.float64):
        x = torch.randn(3, 50).to(dtype)
        assert torch.allclose(way(x), x.double().square().sum(1), rtol=1e-12, atol=0)
    x[1, 7] = float("nan")
    assert way(x).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_empty_rows(way):
    assert way(torch.randn(3, 0)).tolist() == [0, 0, 0]
    assert way(torch.randn(0, 3)).shape == (0,)
