"""Changes of tensors, counted by torch or not."""

from __future__ import annotations

import pytest
import torch

from clipwise.validation.inventory import Changes


def remembered(*tensors: torch.Tensor) -> Changes:
    changes = Changes(tensors)
    changes.remember()
    return changes


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t.data.add_(1),
        lambda t: setattr(t, "data", t.clone()),  # other memory, the same contents
    ],
)
def test_counted_and_uncounted_changes_are_found(change: object) -> None:
    t = torch.ones(3)
    changes = remembered(torch.zeros(2), t)
    assert not changes.may_have_changed()
    change(t)  # type: ignore[operator]
    assert changes.may_have_changed()
    changes.remember()
    assert not changes.may_have_changed()


def test_a_fused_update_is_found() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    changes = remembered(p)
    p.grad = torch.ones(3)
    torch.optim.SGD([p], 0.1, fused=True).step()
    assert changes.may_have_changed()


def test_nan_is_no_change() -> None:
    for value in (torch.nan, torch.inf):
        assert not remembered(torch.full((3,), value)).may_have_changed()


def test_changes_in_other_dtypes_are_found() -> None:
    whole = torch.zeros(2, dtype=torch.int64)
    changes = remembered(whole, torch.ones(2), torch.ones(2).double())
    assert not changes.may_have_changed()
    whole.add_(1)
    assert changes.may_have_changed()


def test_everything_is_changed_before_remember() -> None:
    assert Changes([torch.ones(1)]).may_have_changed()
    assert Changes([]).may_have_changed() and not remembered().may_have_changed()


def test_are_of_compares_identities() -> None:
    a, b = torch.ones(1), torch.ones(1)
    assert Changes([a, b]).are_of([a, b])
    assert not Changes([a, b]).are_of([a]) and not Changes([a, b]).are_of([b, a])


def test_contents_have_moved_before_remember() -> None:
    for t in (torch.ones(3), torch.arange(3)):
        assert bool(Changes([t]).has_moved()) and not bool(remembered(t).has_moved())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_non_finite_numbers_are_compared(value: float) -> None:
    t = torch.zeros(3)
    changes = remembered(t, torch.ones(2))
    t.data.fill_(value)
    assert bool(changes.has_moved())
    changes.remember()
    assert not bool(changes.has_moved())
    t.data.zero_()
    assert bool(changes.has_moved())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4), (5, 7)])
def test_an_uncounted_change_of_one_number_is_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t = torch.ones(shape, dtype=dtype)
    changes = remembered(t)
    for change in (lambda: t.data.reshape(-1)[-1:].zero_(), lambda: t.data.fill_(1)):
        change()
        assert not changes.was_counted() and changes.has_moved()
        changes.remember()
        assert not changes.has_moved()


def test_a_change_of_the_last_bit_is_found() -> None:
    """A norm would not change."""
    t = torch.rand(1000) + 1
    changes = remembered(t)
    t.data[17] = torch.nextafter(t[17], torch.tensor(4.0))
    assert changes.has_moved()


def test_non_contiguous_tensors_are_compared() -> None:
    t = torch.ones(4, 6).mT
    changes = remembered(t, torch.zeros(2))
    assert not changes.may_have_changed()
    t.data[3, 2] = 2.0
    assert not changes.was_counted() and changes.may_have_changed()


def test_freed_memory_is_not_read() -> None:
    t = torch.ones(1000)
    changes = remembered(t)
    t.untyped_storage().resize_(0)
    assert changes.has_moved() and changes.may_have_changed()
    t.untyped_storage().resize_(4000)
    t.fill_(2)
    changes.remember()
    assert not changes.may_have_changed()
    t.data[5] = 0
    assert changes.has_moved()
