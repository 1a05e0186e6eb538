"""A pattern fits the graphs that a comparison in words accepts, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipwise.layers.clip_input import ClipInput
from clipwise.lipschitz import GraphMatch, trace
from clipwise.lipschitz.pattern import NOT_PLAIN, Pattern, plain
from tests.lipschitz.networks import FAMILIES, draw
from tests.lipschitz.test_matching import OTHERS, Twice, X, net


def pattern_of(match: GraphMatch, outputs: Tensor) -> Pattern | None:
    return match._of_the_trace(outputs.device, is_single=len(outputs) == 1)[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_it_fits_what_the_traced_model_makes_for_every_batch_size(family: str) -> None:
    for seed in range(6):
        model, shape = draw(family, seed)
        match = GraphMatch(trace(model, shape))
        for size in (1, 2, 8, 3):
            x = torch.randint(0, 3, (size, *shape)) if family == "table" else torch.randn(size, *shape)
            outputs = model(x)
            pattern = pattern_of(match, outputs)
            assert pattern is not None and pattern.fits(outputs.grad_fn, size)
            assert size == 1 or not pattern.fits(outputs.grad_fn, size + 1)


@pytest.mark.parametrize("what", [name for name in OTHERS if name != "nothing to go back to"])
def test_it_fits_nothing_else(what: str) -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    outputs = model(X)
    pattern = pattern_of(match, outputs)
    assert pattern is not None and pattern.fits(outputs.grad_fn, len(X))
    other = OTHERS[what](model)
    assert not pattern.fits(other.grad_fn, len(X))


def test_a_parameter_in_another_place_does_not_fit() -> None:
    """The operations, their wiring and all shapes are alike."""
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    match = GraphMatch(trace(model, (4,)))
    x = torch.randn(3, 4)
    pattern = pattern_of(match, model(x))
    assert pattern is not None and pattern.fits(model(x).grad_fn, 3)
    for others in ((1, 2, 1), (3, 2, 3), (3, 2, 1)):
        outputs = model[0](x)
        for place in others:
            outputs = model[place](outputs)
        assert not pattern.fits(outputs.grad_fn, 3)


def test_branches_that_cross_do_not_fit() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip, self.a, self.b = ClipInput(1.0), nn.Linear(3, 3), nn.Linear(3, 3)
            self.crosses = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.clip(x)
            one, other = self.a(x).tanh(), self.b(x).sigmoid()
            return one + (one if self.crosses else other) + other

    model = Crossing()
    match = GraphMatch(trace(model, (3,)))
    x = torch.randn(3, 3)
    pattern = pattern_of(match, model(x))
    assert pattern is not None and pattern.fits(model(x).grad_fn, 3)
    model.crosses = True
    assert not pattern.fits(model(x).grad_fn, 3)


def test_where_something_trained_lies_before_a_clip_there_is_no_pattern() -> None:
    model = Twice()
    assert pattern_of(GraphMatch(trace(model, (3,))), model(torch.randn(4, 3))) is None


def test_every_step_reads_what_nodes_keep_so_that_a_used_up_graph_is_noticed() -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    outputs = model(X)
    pattern = pattern_of(match, outputs)
    outputs.sum().backward()
    with pytest.raises(RuntimeError):
        assert pattern is not None and pattern.fits(outputs.grad_fn, len(X))


def test_what_is_plain() -> None:
    assert plain(True) is True and plain("zeros") == "zeros" and plain([1, 2]) == (1, 2)
    assert plain(torch.tensor(2.0)) == 2.0
    trained = torch.tensor(2.0, requires_grad=True)
    for value in (None, torch.ones(1), trained, nn.Parameter(torch.tensor(1.0), False), [None], object()):
        assert plain(value) is NOT_PLAIN
