"""The kernels of backpropagation clipping: measures, factors, scaled rows, tangents, weighted sums."""

import math

import pytest
import torch

from clipwise.kernels import factors, launch, measures, scaled, tangent, weighted
from clipwise.kernels.factors import Limits, Norms
from clipwise.layers.clipped.layer import LIMITS, input_scales, upstream_scales
from tests.kernels.ways import both, needs_triton

SHAPES = [(3, 5, 7), (2, 70, 3), (4, 33, 1), (1, 3, 3000), (2, 1, 130), (5, 4, 64)]
LAYOUTS = {
    "rows": lambda t: t.contiguous(),
    "channels last": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: t.repeat_interleave(2, 2)[..., ::2],
}
NOT_FINITE = [math.nan, math.inf, -math.inf]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def made(shape, layout="rows", seed=0):
    random = torch.Generator().manual_seed(seed)
    return LAYOUTS[layout](torch.randn(shape, generator=random))


# ------------------------------------------------------------------ measures


@pytest.mark.parametrize("way", both(measures.measures_in_torch, measures.measures))
@layouts
@shapes
@pytest.mark.parametrize("groups", [None, 1, "all"])
def test_measures(way, shape, layout, groups):
    g = made(shape, layout)
    B, K, R = shape
    G = K if groups == "all" else groups
    lengths = None if G is None else made((B, G, R), seed=1).abs()
    found = way(g, lengths, total=True, mass=True, square=True)
    exact = g.double()
    torch.testing.assert_close(found.total.double(), exact.sum(2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.mass.double(), exact.abs().sum(2), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.square, exact.square().sum(2), rtol=1e-12, atol=0)
    if lengths is None:
        assert found.weighted is None
    else:
        of_each = lengths.double().repeat_interleave(K // G, 1)
        torch.testing.assert_close(found.weighted.double(), (exact.abs() * of_each).sum(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", both(measures.measures_in_torch, measures.measures))
def test_measures_that_are_not_requested(way):
    g = made((2, 3, 4))
    assert way(g) == (None, None, None, None)
    assert [t is None for t in way(g, mass=True)] == [True, False, True, True]
    assert way(torch.zeros(0, 3, 4), total=True).total.shape == (0, 3)
    assert way(g.half(), square=True).square.dtype == torch.float64
    assert way(g.double(), total=True).total.dtype == torch.float64


# ------------------------------------------------------------------ factors


@pytest.mark.parametrize("way", both(factors.input_factors_in_torch, factors.input_factors))
def test_input_factors(way):
    norms = torch.tensor([0.0, 0.5, 2.0, 2.1, 1e30, math.inf, math.nan], dtype=torch.float64)
    norm_B, scale_B = way(norms.square(), 2.0, LIMITS)
    torch.testing.assert_close(norm_B, norms, rtol=1e-15, atol=0, equal_nan=True)
    torch.testing.assert_close(scale_B, input_scales(norms, 2.0), rtol=1e-6, atol=0)
    assert way(torch.zeros(0, dtype=torch.float64), 1.0, LIMITS)[1].shape == (0,)


@pytest.mark.parametrize("way", both(factors.gradient_factors_in_torch, factors.gradient_factors))
@pytest.mark.parametrize("K", [1, 5, 3000])
@pytest.mark.parametrize("most", [1.0, 1e4])
@pytest.mark.parametrize("bound", [0.7, None])
def test_gradient_factors(way, K, most, bound):
    size_B = torch.tensor([0.0, 1e-38, 1e-6, 1.0, 5.0, 1e20, 1.0], dtype=torch.float64)
    rows = (made((7, K, 1))[..., 0] * size_B[:, None]).float()
    rows[6, 0] = math.nan
    others = made((7, K, 1), seed=1)[..., 0]
    times = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    a, b = rows.double().norm(dim=1), others.double().norm(dim=1)

    def expected(norm_B):
        return torch.isfinite(norm_B).double() if bound is None else upstream_scales(norm_B, bound, most)

    for norms, norm_B in (
        (Norms(rows), a),
        (Norms(rows, first_times=3.0, times=times), 3 * a * times),
        (Norms(None, others.double().square(), has_squares=True, second_times=2.0), 2 * b),
        (Norms(rows, others, first_times=2.0, second_times=0.5), torch.minimum(2 * a, 0.5 * b)),
        (Norms(rows, others, second_times=0.1, takes_larger=True), torch.maximum(a, 0.1 * b)),
    ):
        found = way(norms, bound, most, LIMITS)
        assert found.dtype == torch.float64
        which = slice(None) if norms.first is None or norms.second is None or norms.takes_larger else slice(6)
        torch.testing.assert_close(found[which], expected(norm_B)[which], rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", both(factors.gradient_factors_in_torch, factors.gradient_factors))
@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_example_that_is_not_finite_has_factor_0(way, value):
    fine, bad = torch.ones(2, 3), torch.ones(2, 3)
    bad[1, 2] = value
    for norms in (Norms(bad), Norms(None, bad.double().square(), has_squares=True),
                  Norms(bad, bad), Norms(bad, fine, takes_larger=True), Norms(fine, bad, takes_larger=True),
                  Norms(fine, times=bad[:, 2].double())):  # fmt: skip
        for bound in (1.0, None):
            found = way(norms, bound, 1e4, LIMITS)
            assert found[0] > 0 and (found[1] == 0 or (value == -math.inf and norms.times is not None))


def test_limits_are_those_of_the_layers():
    assert isinstance(LIMITS, Limits) and 0.99 < LIMITS.aim < 1


# ------------------------------------------------------------------ scaled


@pytest.mark.parametrize("way", both(scaled.scaled_in_torch, scaled.scaled))
@layouts
@shapes
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_scaled(way, shape, layout, biased, in_place):
    t = made(shape, layout)
    t[0, 0, 0] = math.nan
    factor = torch.linspace(0, 1, shape[0], dtype=torch.float64)
    bias = made((1, shape[1], 2))[0, :, 0] if biased else None
    expected = torch.where(factor[:, None, None] > 0, t.double() * factor[:, None, None], 0)
    expected = expected + (0 if bias is None else bias.double()[:, None])
    out = t if in_place else None
    found = way(t, factor, bias, out)
    assert (found is t) == in_place
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", both(scaled.scaled_in_torch, scaled.scaled))
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_of_an_expanded_row(way, biased):
    """The gradient of a mean over positions."""
    t = made((3, 5, 1)).expand(3, 5, 7)
    t[1, 2, 0] = math.nan
    factor = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    bias = made((1, 5, 1), seed=1)[0, :, 0] if biased else None
    expected = torch.where(factor[:, None, None] > 0, t.double() * factor[:, None, None], 0)
    expected = expected + (0 if bias is None else bias.double()[:, None])
    before = t.clone()
    for layout in ("rows", "channels last"):
        found = way(t, factor, bias, LAYOUTS[layout](torch.full((3, 5, 7), math.nan)))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(t, before, equal_nan=True)


@pytest.mark.parametrize("way", both(scaled.scaled_in_torch, scaled.scaled))
def test_scaled_of_other_dtypes_and_empty_tensors(way):
    t = made((2, 3, 4)).bfloat16()
    found = way(t, torch.tensor([0.5, 1.0], dtype=torch.float64), torch.ones(3).bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[0], (t[0].float() * 0.5 + 1).bfloat16())
    assert way(torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.float64)).shape == (0, 2, 3)


# ------------------------------------------------------------------ tangent


@pytest.mark.parametrize("way", both(tangent.to_tangent_in_torch_, tangent.to_tangent_))
@layouts
@shapes
@pytest.mark.parametrize("restored", [False, True])
def test_tangent(way, shape, layout, restored):
    x, dx = made(shape, layout), made(shape, "channels last" if layout == "channels last" else "rows", 1)
    B = shape[0]
    norm = x.double().flatten(1).norm(dim=1)
    scale = torch.tensor([0.5, 1.0, 0.0, 0.25, 0.9], dtype=torch.float64)[:B]
    x[scale == 0] = math.nan  # such rows are not read
    nu = torch.linspace(0.5, 2.0, B, dtype=torch.float64) if restored else None
    start = dx.double() if nu is None else dx.double() / nu[:, None, None]
    unit = torch.where(((scale > 0) & (scale < 1))[:, None, None], x.double() / norm[:, None, None], 0)
    expected = start - unit * (unit * start).sum((1, 2), keepdim=True)
    found = way(dx, x, norm, scale, nu)
    assert found is dx
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("channels last",) * 2, ("rows", "channels last")], ids=str)
@pytest.mark.parametrize("restored", [False, True])
def test_tangent_of_examples_longer_than_a_program_holds(monkeypatch, layouts, restored):
    monkeypatch.setattr(tangent, "_HELD", 64)
    monkeypatch.setattr(tangent, "_TILE", 32)
    monkeypatch.setattr(tangent, "_PROGRAMS", 2)
    x, dx = made((5, 9, 21), layouts[0]), made((5, 9, 21), layouts[1], 1)
    norm = x.double().flatten(1).norm(dim=1)
    scale = torch.tensor([0.5, 1.0, 0.0, 0.25, 0.9], dtype=torch.float64)
    nu = torch.linspace(0.5, 2.0, 5, dtype=torch.float64) if restored else None
    expected = tangent.to_tangent_in_torch_(dx.double(), x.double(), norm, scale, nu)
    torch.testing.assert_close(tangent.to_tangent_(dx, x, norm, scale, nu).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", both(tangent.to_tangent_in_torch_, tangent.to_tangent_))
def test_a_gradient_that_is_not_finite_stays_in_its_example(way):
    x, dx = made((3, 4, 5)), made((3, 4, 5), seed=1)
    dx[1, 2, 3] = math.nan
    scale = torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64)
    found = way(dx.clone(), x, x.double().flatten(1).norm(dim=1), scale, torch.full((3,), 0.5).double())
    assert found[0].isfinite().all() and found[2].isfinite().all()
    assert found[1].isnan().sum() == 1


# ------------------------------------------------------------------ partition of operands over programs


def test_contiguous_examples_are_rows():
    t = torch.zeros(2, 3, 5)
    last = LAYOUTS["channels last"](t)
    assert launch.rows_of(t, t) == (15, 5)
    assert launch.rows_of(last, last) == (15, 1)
    assert launch.rows_of(t, last) is None
    assert launch.rows_of(LAYOUTS["every second"](t)) is None
    assert launch.rows_of(torch.zeros(4, 7)[:, :5].unsqueeze(1)) == (5, 5)
    assert launch.rows_of(torch.zeros(4, 7)[:, ::2].unsqueeze(1)) is None
    assert launch.rows_of(torch.zeros(2, 0, 5)) is None
    # Entries are counted in 32 bits.
    assert launch.rows_of(torch.empty(2, 2**16, 2**15, device="meta")) is None
    assert launch.rows_of(torch.empty(2, 2**15, 2**15, device="meta")) == (2**30, 2**15)


@pytest.mark.parametrize("entries", [16, 256, 4096])
def test_tiles_are_long_along_the_contiguous_axis(entries):
    t = torch.zeros(1, 32, 64)
    assert launch.tile_of(t, entries) == {16: (1, 16), 256: (4, 64), 4096: (32, 64)}[entries]
    last = LAYOUTS["channels last"](t)
    assert launch.tile_of(last, entries) == {16: (16, 1), 256: (32, 8), 4096: (32, 64)}[entries]
    assert launch.tile_of(torch.zeros(1, 20, 1), entries) == (min(entries, 32), 1)
    assert launch.tile_of(torch.zeros(1, 1, 20), entries) == (1, min(entries, 32))


# ------------------------------------------------------------------ weighted sums


@pytest.mark.parametrize("way", both(weighted.weighted_sum_in_torch, weighted.weighted_sum))
@pytest.mark.parametrize("shape", [(3, 5), (200, 70), (33, 1), (1, 130)], ids=str)
def test_weighted_sum(way, shape):
    rows = made((*shape, 1))[..., 0]
    weight = torch.linspace(0, 2, shape[0], dtype=torch.float64)
    expected = (rows.double() * weight[:, None]).sum(0)
    rows[0] = math.nan  # has weight 0
    torch.testing.assert_close(way(rows, weight).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(way(rows.mT.contiguous().mT, weight).double(), expected, rtol=1e-5, atol=1e-4)
    assert way(torch.zeros(0, 3), torch.zeros(0, dtype=torch.float64)).tolist() == [0, 0, 0]
