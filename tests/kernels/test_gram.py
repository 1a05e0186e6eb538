"""Gram norms are close upper bounds."""

import pytest
import torch

from clipwise.kernels import gram
from tests.kernels.ways import both, needs_triton

WAYS = both(lambda left, right, precision: gram.gram_norms_in_torch(left, right), gram.gram_norms)
PRECISIONS = ["tf32", "ieee"]
SHAPES = [(3, 5, 7, 300), (2, 33, 130, 40), (2, 197, 40, 70), (1, 1100, 9, 6), (2, 1, 4, 3)]


def exact(left, right):
    left, right = left.double(), right.double()
    square_B = (left.mT @ right).square().sum((1, 2))
    return square_B, (left.norm(dim=2) * right.norm(dim=2)).sum(1)


def rows(B, T, n, dtype=torch.float32):
    """Rows with examples that are not along the first axis in memory, and with strided features."""
    return torch.randn(n, T, B).permute(2, 1, 0).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("B,T,m,n", SHAPES)
def test_bounds_are_above_and_close(way, precision, B, T, m, n):
    torch.manual_seed(T)
    left, right = torch.randn(B, T, m), rows(B, T, n)
    square_B, mass_B = way(left, right, precision)
    true_square_B, true_mass_B = exact(left, right)
    assert square_B.dtype == mass_B.dtype == torch.float64
    assert (square_B >= true_square_B).all() and (mass_B >= true_mass_B).all()
    assert (square_B <= true_square_B * 1.01).all()
    assert (mass_B <= true_mass_B * 1.0021).all()


@needs_triton
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_chunks_of_features(monkeypatch, precision):
    """The chunking of wide rows, tested on narrow rows."""
    monkeypatch.setattr(gram, "_CHUNK", 16)
    torch.manual_seed(3)
    left, right = torch.randn(2, 140, 70), rows(2, 140, 30)
    square_B, mass_B = gram.gram_norms(left, right, precision)
    true_square_B, true_mass_B = exact(left, right)
    assert (square_B >= true_square_B).all() and (square_B <= true_square_B * 1.01).all()
    assert (mass_B >= true_mass_B).all() and (mass_B <= true_mass_B * 1.0021).all()


@needs_triton
def test_examples_of_long_contexts_are_taken_in_pieces(monkeypatch):
    torch.manual_seed(0)
    left, right = torch.randn(5, 40, 7), rows(5, 40, 9)
    whole = gram.gram_norms(left, right, "ieee")
    monkeypatch.setattr(gram, "_INNER_BYTES", 2 * 8 * 40 * 40)
    for found, expected in zip(gram.gram_norms(left, right, "ieee"), whole, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float16, torch.float32)])
def test_half_precision_rows(way, dtypes):
    torch.manual_seed(0)
    left, right = rows(3, 40, 50, dtypes[0]), rows(3, 40, 60, dtypes[1])
    square_B, mass_B = way(left, right, "ieee")
    true_square_B, true_mass_B = exact(left, right)
    assert (square_B >= true_square_B).all() and (square_B <= true_square_B * 1.01).all()
    assert (mass_B >= true_mass_B).all() and (mass_B <= true_mass_B * 1.0001).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cancelling_positions_are_still_bounded(way, precision):
    """The second half of the positions cancels the first: products are far larger than their sum."""
    torch.manual_seed(1)
    left, right = torch.randn(8, 32, 64), torch.randn(8, 32, 48)
    left, right = torch.cat([left, left], 1), torch.cat([right, -right * (1 + 1e-5)], 1)
    square_B, _ = way(left, right, precision)
    true_square_B, true_mass_B = exact(left, right)
    assert (square_B >= true_square_B).all()
    assert (square_B.sqrt() <= 0.01 * true_mass_B).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e15])
def test_any_scale(way, scale):
    """Squares below the range of float32 must not vanish."""
    torch.manual_seed(2)
    left, right = torch.randn(2, 20, 30) * scale, torch.randn(2, 20, 10)
    square_B, mass_B = way(left, right, "ieee")
    true_square_B, true_mass_B = exact(left, right)
    assert (square_B >= true_square_B).all() and (mass_B >= true_mass_B).all()
    assert (square_B.sqrt() <= 1.01 * true_square_B.sqrt() + 1e-12).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_in_their_example(way, bad):
    left, right = torch.randn(3, 20, 6), torch.randn(3, 20, 7)
    left[1, 3, 2] = bad
    square_B, _ = way(left, right, "tf32")
    assert torch.isfinite(square_B).tolist() == [True, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_empty_sums(way):
    square_B, mass_B = way(torch.randn(2, 0, 3), torch.randn(2, 0, 4), "tf32")
    assert square_B.tolist() == mass_B.tolist() == [0, 0]
    assert all(len(x) == 0 for x in way(torch.randn(0, 2, 3), torch.randn(0, 2, 4), "ieee"))


@pytest.mark.parametrize(("T", "short"), [(1, 512), (5, 512), (130, 512), (130, 64), (200, 64), (600, 512)])
@pytest.mark.parametrize("chunk", [16, 1536])
def test_inner_products_hold_all_pairs_once(monkeypatch, T, short, chunk):
    """For long rows only the blocks on and below the diagonal; for short ones all. No GPU is needed."""
    monkeypatch.setattr(gram, "_SHORT", short)
    monkeypatch.setattr(gram, "_CHUNK", chunk)
    torch.manual_seed(T)
    x_BTm = torch.randn(3, T, 37)
    found, first = gram.inner_products(x_BTm), gram._first_block(T)
    expected = x_BTm.double() @ x_BTm.double().mT
    assert found.shape == expected.shape and (first < T) == (short < T)
    blocks = [(slice(0, first), slice(0, first)), (slice(first, T), slice(0, T))]
    for rows_, columns in blocks:
        torch.testing.assert_close(found[:, rows_, columns].double(), expected[:, rows_, columns], rtol=1e-4, atol=1e-4)


def test_rows_of_the_next_example_have_no_effect():
    """They are multiplied for alignment; even a NaN there has no effect."""
    torch.manual_seed(0)
    x_BTm = torch.randn(4, 5, 8)
    alone = gram.inner_products(x_BTm)
    spoiled = x_BTm.clone()
    spoiled[2] = float("nan")
    found = gram.inner_products(spoiled)
    kept = [0, 1, 3]
    torch.testing.assert_close(found[kept], alone[kept], rtol=1e-6, atol=1e-6)
    assert found[2].isnan().all()
