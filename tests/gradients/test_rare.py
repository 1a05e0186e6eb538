"""Rare events: checked immediately, or deferred and found later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.clipping.per_example import PerExampleClipper
from clipwise.gradients.precision import PutAside, Rare
from tests.soundness.neighbours import attach

questions = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), max_size=6)


@given(asked=questions)
def test_deferred_checks_give_the_immediate_answer(asked: list[list[bool]]) -> None:
    flags = [torch.tensor(answers) for answers in asked]
    at_once, aside = Rare(), PutAside()
    assert [at_once.any(f) for f in flags] == [any(answers) for answers in asked]
    assert [aside.any(f) for f in flags] == [False] * len(flags)
    happened = aside.happened()
    if not asked:
        assert happened is None
    else:
        assert happened is not None and happened.shape == ()
        assert bool(happened) == any(map(any, asked))


def test_flags_of_several_parameters_are_one_check() -> None:
    aside = PutAside()
    aside.any(torch.zeros(2, 3, dtype=torch.bool))
    assert not bool(aside.happened())
    aside.any(torch.tensor([[False, False], [False, True]]))
    assert bool(aside.happened())


# In a clipper: every event that the clipper would treat is deferred.


class Positions(nn.Module):
    """A linear layer over positions, measured by inner products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        signs = 1 - 2.0 * (torch.arange(x.shape[1]) % 2)
        return (self.a(x) * signs[:, None] * torch.linspace(0.5, 2, 48)).flatten(1).sum(1)


def settled(model: nn.Module) -> PerExampleClipper:
    """A clipper with a known graph."""
    clipper = attach(model, PerExample(0.3, method="bookkeeping"))
    assert isinstance(clipper, PerExampleClipper)
    for seed in range(3):
        torch.manual_seed(seed)
        clipper.clipped_sum(model(torch.randn(4, 8, 64)))
    return clipper


def batch(kind: str) -> Tensor:
    torch.manual_seed(5)
    x = torch.randn(4, 8, 64)
    if kind == "cancelling":
        x[2] = x[2, :1]
    elif kind != "ordinary":
        x[2, 3, 1] = float(kind)
    return x


@pytest.mark.parametrize(
    ("kind", "expected"), [("ordinary", False), ("cancelling", True), ("nan", True), ("inf", True)]
)
def test_a_clipper_defers_the_checks_for_rare_events(kind: str, expected: bool) -> None:
    model, x = Positions(), batch(kind)
    clipper = settled(model)
    with clipper.putting_aside() as aside:
        hasty = clipper.clipped_sum(model(x))
    assert bool(aside.happened()) is expected
    careful = clipper.clipped_sum(model(x))  # outside of the block it checks again
    assert all(torch.isfinite(t).all() for t in careful.values())
    is_same = all(torch.equal(hasty[name], careful[name]) for name in careful)
    assert is_same is not expected


def test_after_an_error_in_the_block_the_clipper_checks_again() -> None:
    model, x = Positions(), batch("nan")
    clipper = settled(model)
    with pytest.raises(ZeroDivisionError), clipper.putting_aside():
        raise ZeroDivisionError
    assert all(torch.isfinite(t).all() for t in clipper.clipped_sum(model(x)).values())


def test_each_block_defers_its_own_checks() -> None:
    model = Positions()
    clipper = settled(model)
    with clipper.putting_aside() as outer:
        clipper.clipped_sum(model(batch("ordinary")))
        with clipper.putting_aside() as inner:
            clipper.clipped_sum(model(batch("nan")))
        clipper.clipped_sum(model(batch("ordinary")))
    assert bool(inner.happened()) and not bool(outer.happened())
