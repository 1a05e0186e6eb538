"""Norms are upper bounds for every form; sums and instantiated gradients agree."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipwise.gradients import Memory, forms, per_example_gradients
from clipwise.gradients.forms import Budget, Form, Outer, Rows, Written, measured, squared_norms

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@QUICK
@given(
    st.sampled_from([1, 2, 255, 256, 257, 512, 1000]),
    st.sampled_from([1e-42, 1e-30, 1e-20, 1e-5, 1.0, 1e10, 1e18]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_a_squared_norm_is_a_close_upper_bound(n: int, scale: float, dtype: torch.dtype, seed: int) -> None:
    x = (torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)
    bounds = squared_norms(x)
    assert bounds.dtype == torch.float64
    for row, bound in zip(x.double().tolist(), bounds.tolist(), strict=True):
        exact = math.fsum(v * v for v in row)
        assert exact <= bound <= exact * 1.0001 + 2 * n * torch.finfo(torch.float32).tiny


def test_adversarial_orders_of_summation_are_covered() -> None:
    """One large entry and many small ones that it absorbs, at once or one by one."""
    for n in (256, 4096, 10_000):
        x = torch.full((2, n), 2.0**-12.5)
        x[0, 0], x[1, -1] = 1.0, 1.0
        exact = torch.tensor([math.fsum(v * v for v in row) for row in x.double().tolist()], dtype=torch.float64)
        assert (squared_norms(x) >= exact).all()


def test_an_empty_gradient_has_no_length() -> None:
    assert squared_norms(torch.zeros(3, 0)).tolist() == [0, 0, 0]


def outer(T: int, m: int, n: int, dtype: torch.dtype) -> Outer:
    return Outer(torch.randn(4, T, m).to(dtype), torch.randn(4, T, n).to(dtype))


def rows(T: int, m: int, n: int, dtype: torch.dtype) -> Rows:
    example = torch.arange(4).repeat_interleave(T)
    return Rows(example, torch.randint(0, m, (4 * T,)), torch.randn(4 * T, n).to(dtype), 4, torch.Size((m, n)))


def written(T: int, m: int, n: int, dtype: torch.dtype) -> Written:
    ready = torch.randn(4, m, n).to(dtype)
    return Written(4, torch.Size([m, n]), dtype, lambda examples: ready[examples])


@pytest.mark.parametrize("keep", [0, 2**30])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("sizes", [(1, 3, 4), (3, 4, 3), (2, 40, 30), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("make", [outer, rows, written])
def test_norms_and_sums_are_those_of_the_instantiated_gradients(
    make: type[Form], sizes: tuple[int, int, int], dtype: torch.dtype, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms.base, "CHUNK_BYTES", 3 * sizes[1] * sizes[2] * 8)
    torch.manual_seed(0)
    form = make(*sizes, dtype)
    each: Tensor = form.instantiate(slice(0, 4)).double()
    norms, weights = each.flatten(1).norm(dim=1), torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    found = measured(form, Budget(keep)).sqrt()
    assert (found >= norms * (1 - 1e-6)).all()
    torch.testing.assert_close(found, norms, rtol=tolerance, atol=1e-12)
    expected = torch.einsum("b,bmn->mn", weights, each)
    torch.testing.assert_close(form.weighted_sum(weights).double(), expected, rtol=tolerance, atol=tolerance)
    # Muted after the norms were computed: a NaN would survive a weight of 0.
    muted = torch.tensor([False, True, False, True])
    form.mute(muted)
    expected = torch.einsum("b,bmn->mn", weights.masked_fill(muted, 0), each)
    torch.testing.assert_close(form.weighted_sum(weights).double(), expected, rtol=tolerance, atol=tolerance)


def test_low_precision_factors_are_multiplied_in_float32() -> None:
    form = outer(3, 4, 5, torch.bfloat16)
    assert form.weighted_sum(torch.ones(4)).dtype == torch.float32
    assert form.instantiate(slice(0, 1)).dtype == torch.float32


def test_written_gradients_in_low_precision_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    form = Written.of(torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16))
    assert form.weighted_sum(torch.ones(2)).item() == 257.0


def test_a_budget_is_spent_once() -> None:
    budget = Budget(100)
    assert budget.take(60) and not budget.take(60) and budget.take(40)
    assert budget.left == 0


def test_gradients_of_nothing_are_not_worth_writing_out() -> None:
    """Without a gradient, a Gram norm is pure rounding error, and needs no tightening."""
    left = torch.randn(3, 4, 512)
    right = torch.randn(3, 4, 512)
    right[1:] = 0
    form = Outer(left, right)
    measured(form, Budget(0))
    assert not form._exact


@pytest.mark.parametrize("budget", [0, 2**30], ids=["made again", "kept"])
def test_an_example_that_cancels_is_summed_separately(budget: int) -> None:
    """Its terms are huge relative to its gradient: a float32 product with the others would lose both."""
    torch.manual_seed(0)
    left, right = torch.randn(3, 4, 40), torch.randn(3, 4, 30)
    left[1, 2:], right[1, 2:] = left[1, :2], -right[1, :2]
    left[1] *= 1e6
    right[1, 2:] *= 1 + 2**-12  # cancels almost exactly
    form = Outer(left, right)
    norms = measured(form, Budget(budget)).sqrt()
    truth = left.double().mT @ right.double()
    torch.testing.assert_close(norms, truth.flatten(1).norm(dim=1), rtol=1e-5, atol=0)
    weights = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64)
    total = form.weighted_sum(weights)
    torch.testing.assert_close(total.double(), torch.einsum("b,bmn->mn", weights, truth), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("keep", [0, 2**20])
def test_pieces_change_nothing(piece: int, keep: int) -> None:
    torch.manual_seed(0)
    gradients, w = torch.randn(5, 3, 2), torch.rand(5, dtype=torch.float64)
    muted = torch.tensor([False, True, False, False, True])

    def make(examples: slice) -> torch.Tensor:
        return gradients[examples].clone()

    whole, cut = (Written(5, gradients.shape[1:], torch.float32, make, p) for p in (None, piece))
    for form in (whole, cut):
        torch.testing.assert_close(measured(form, Budget(keep)).sqrt().float(), gradients.flatten(1).norm(dim=1))
        assert form.is_kept == (keep > 0)
        torch.testing.assert_close(form.weighted_sum(w), torch.einsum("b,bmn->mn", w.float(), gradients))
        form.mute(muted)
        left = torch.where(muted, 0, w).float()
        torch.testing.assert_close(form.weighted_sum(w), torch.einsum("b,bmn->mn", left, gradients))
        assert torch.equal(form.instantiate(slice(1, 4)), gradients[1:4] * ~muted[1:4, None, None])


@pytest.mark.slow
def test_nothing_of_a_batch_waits_for_the_garbage_collector() -> None:
    """Otherwise the factors of an example's gradient would stay in memory until then."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    memory = Memory()
    for _ in range(3):
        found = per_example_gradients(model(torch.randn(4, 7, 5)).sum((1, 2)), dict(model.named_parameters()), memory)
        found.weighted_sums({n: torch.ones(4, dtype=torch.float64) for n in found.squared_norms()})
        del found
    gc.collect()
    found = per_example_gradients(model(torch.randn(4, 7, 5)).sum((1, 2)), dict(model.named_parameters()), memory)
    found.weighted_sums({n: torch.ones(4, dtype=torch.float64) for n in found.squared_norms()})
    del found
    assert _of_ours_in_the_garbage() == []


def _of_ours_in_the_garbage() -> list[object]:
    """Only clipwise's objects: threads of other libraries may have left garbage too."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [x for x in gc.garbage if isinstance(x, Tensor) or type(x).__module__.startswith("clipwise")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("T", [95, 96, 130])
def test_inner_products_of_many_positions_come_in_blocks(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the blocks, and few features at a time, give the norm of the whole."""
    monkeypatch.setattr(forms.outer, "_FEATURES", 150)
    torch.manual_seed(0)
    left, right = torch.randn(3, T, 400), torch.randn(3, T, 310)
    square_B, mass_B = Outer(left, right).gram_squares(Budget(0))
    true_B = torch.einsum("btm,btn->bmn", left.double(), right.double()).flatten(1).norm(dim=1)
    assert (square_B.sqrt() >= true_B * (1 - 1e-15)).all()
    torch.testing.assert_close(square_B.sqrt(), true_B, rtol=1e-9, atol=0)
    assert (mass_B >= true_B).all()


def test_gradients_with_the_same_left_rows_share_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a recurrent layer: rows lie in the order of time, and two weights have the same left rows."""
    monkeypatch.setattr(forms.outer, "_CACHED_BYTES", 1)  # one example at a time
    multiplied: list[Tensor] = []
    multiply = forms.outer.inner_products
    monkeypatch.setattr(forms.outer, "inner_products", lambda x: multiplied.append(x) or multiply(x))
    torch.manual_seed(0)
    left, *rights = (torch.randn(3, 5, width).transpose(0, 1) for width in (40, 3, 9))
    w_B, budget = torch.rand(5), Budget(0)
    for right, beside in zip(rights, (9, 3), strict=True):
        outer = Outer(left, right, beside=beside)
        square_B = outer.squared_norms(budget)
        each = torch.einsum("btm,btn->bmn", left.double(), right.double())
        true_B = each.flatten(1).norm(dim=1)
        assert (square_B.sqrt() >= true_B * (1 - 1e-15)).all()
        torch.testing.assert_close(square_B.sqrt(), true_B, rtol=1e-5, atol=0)
        expected = torch.einsum("b,bmn->mn", w_B.double(), each)
        torch.testing.assert_close(outer.weighted_sum(w_B).double(), expected, rtol=1e-5, atol=1e-5)
    assert [x.shape[2] for x in multiplied] == [40] * 5 + [3] * 5 + [9] * 5


def test_written_gradients_keep_their_memory_while_they_are_used() -> None:
    torch.manual_seed(0)
    first, second = (Outer(torch.randn(4, 9, 6), torch.randn(4, 9, 5)) for _ in range(2))
    expected = first.instantiate(slice(0, 4)).clone()
    first.squared_norms(Budget(2**20))
    second.squared_norms(Budget(2**20))
    second.instantiate(slice(0, 4))
    assert torch.equal(first.instantiate(slice(0, 4)), expected)
