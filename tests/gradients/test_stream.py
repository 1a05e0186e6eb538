"""Passes that keep no gradients: exact, with little memory, and without leftover hooks."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise.gradients import FallbackWarning, Memory, per_example_gradients, stream
from clipwise.gradients.methods import Reweighted
from clipwise.gradients.precision import Rare
from clipwise.gradients.rules import registry
from tests.gradients.cases import CASES, Case, losses, oracle, trainable

DEPTH, BATCH, WIDTH = 12, 8, 16


class Deep(nn.Module):
    """A chain of layers that records the gradients at their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.most_bytes = 0
        self._storages: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.register_hook(self._note)
            x = x + y.tanh()
        return x

    def _note(self, g: Tensor) -> None:
        self._storages.append(weakref.ref(g.untyped_storage()))
        alive = (storage() for storage in self._storages)
        self.most_bytes = max(self.most_bytes, sum(s.nbytes() for s in alive if s is not None))


def most_bytes(method: str) -> int:
    """The peak bytes of output gradients alive at once, on a batch with a known graph."""
    torch.manual_seed(0)
    model, memory = Deep(), Memory()
    for _ in range(3):
        model.most_bytes = 0
        found = per_example_gradients(model(torch.randn(BATCH, WIDTH)).sum(1), trainable(model), memory, method)
        ones_B = torch.ones(BATCH, dtype=torch.float64)
        found.weighted_sums(dict.fromkeys(found.squared_norms(), ones_B))
    return model.most_bytes


def test_few_output_gradients_are_alive_at_once() -> None:
    one = BATCH * WIDTH * 4
    assert most_bytes("reweight") <= 3 * one
    assert most_bytes("bookkeeping") >= DEPTH * one


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each streamed pass, whether its layouts were right."""
    held: list[bool] = []
    honest = stream.Stream._flows

    def noted(self: stream.Stream, now: stream.Pass) -> bool:
        held.append(honest(self, now))
        return held[-1]

    monkeypatch.setattr(stream.Stream, "_flows", noted)
    return held


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_both_passes_are_exact_when_both_are_streamed(case: Case, flows: list[bool]) -> None:
    """On the first batches of a graph the probe provides the gradients; here they are dropped."""
    model, inputs, memory = case.build(torch.float64), case.draw(4, torch.float64), Memory()
    parameters, w_B = trainable(model), torch.rand(4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = stream.Stream(losses(model, inputs), parameters, memory)
        found._gradients, found._open = None, []  # and rules are not compared in a separate pass
        gradients = Reweighted(found, 4, memory)
        squares = gradients.squared_norms()
        sums = gradients.weighted_sums(dict.fromkeys(parameters, w_B))
    assert flows == [True, True]
    truth = oracle(model, inputs)
    scale = max(float(g.reshape(4, -1).norm(dim=1).max()) for g in truth.values())
    for name, expected in truth.items():
        norm_B = expected.reshape(4, -1).norm(dim=1)
        assert (squares[name].sqrt() - norm_B).abs().max() <= 1e-9 * scale, name
        weighted = torch.einsum("b,b...->...", w_B, expected)
        assert (sums[name] - weighted).abs().max() <= 1e-10 * scale * 4, name


def known(model: nn.Module, x: Tensor, memory: Memory) -> None:
    """Process batches until the layouts are known."""
    for _ in range(2):
        per_example_gradients(model(x).sum(1), trainable(model), memory).squared_norms()


def test_no_hook_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    honest = stream.Stream._arrives

    def counted(self: stream.Stream, *arguments: Any) -> None:
        calls.append(arguments)
        honest(self, *arguments)

    monkeypatch.setattr(stream.Stream, "_arrives", counted)
    model, x, memory = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 3), Memory()
    known(model, x, memory)
    found = model(x).sum(1)
    per_example_gradients(found, trainable(model), memory, "reweight").squared_norms()
    assert len(calls) == 1
    found.sum().backward()
    assert len(calls) == 1


class Odd(Exception):  # noqa: N818 (raised by a rule in a test)
    pass


def test_an_error_in_a_rule_is_raised_and_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, memory = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 3), Memory()
    known(model, x, memory)
    odd = Odd("a number")

    def failing(node: Any, shapes: registry.Shapes) -> registry.Finish:
        def finish(g: Tensor, layout: Any) -> Any:
            raise odd

        return finish

    found = model(x).sum(1)
    monkeypatch.setitem(registry.RULES, "AddmmBackward0", registry.Registered(failing))
    with pytest.raises(Odd) as raised:
        per_example_gradients(found, trainable(model), memory, "reweight").squared_norms()
    assert raised.value is odd
    found.sum().backward()


@pytest.mark.slow
def test_nothing_of_a_batch_waits_for_the_garbage_collector() -> None:
    model, x, memory = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 3), Memory()
    known(model, x, memory)
    for collected in (False, True):
        found = per_example_gradients(model(x).sum(1), trainable(model), memory, "reweight")
        found.weighted_sums(dict.fromkeys(found.squared_norms(), torch.ones(4, dtype=torch.float64)))
        del found
        unreachable = gc.collect()
        assert not collected or unreachable == 0


def test_a_layout_that_turns_out_wrong_is_found_again(flows: list[bool]) -> None:
    """With T = 9 and B = 4, row 9 i belongs to example i both time first and batch first, until other rows count."""
    torch.manual_seed(0)
    model, memory = nn.Linear(3, 2).double(), Memory()
    mask_TB = (torch.arange(9)[:, None] == 2 * torch.arange(4)).double()
    for only_some in (True, True, True, False):
        x = torch.randn(9, 4, 3, dtype=torch.float64)
        w_TB = mask_TB if only_some else torch.ones_like(mask_TB)

        def per_example(x: Tensor = x, w_TB: Tensor = w_TB) -> Tensor:
            return (model(x).tanh().sum(2) * w_TB).sum(0)

        found = per_example_gradients(per_example(), trainable(model), memory, "reweight")
        squares = found.squared_norms()
        sums = found.weighted_sums(dict.fromkeys(squares, torch.ones(4, dtype=torch.float64)))
        each = per_example_gradients(per_example(), trainable(model), Memory(), "loop").instantiate(slice(0, 4))
        for name, truth in each.items():
            torch.testing.assert_close(squares[name].sqrt(), truth.flatten(1).norm(dim=1))
            torch.testing.assert_close(sums[name], truth.sum(0))
    assert False in flows


# Deferred checks


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The results of checks that the host waited for, as on a GPU."""
    answers: list[bool] = []
    honest = Rare.any

    def noted(self: Rare, flags: Tensor) -> bool:
        answers.append(honest(self, flags))
        return answers[-1]

    monkeypatch.setattr(Rare, "any", noted)
    monkeypatch.setattr(stream.Stream, "is_on_cuda", True)
    return answers


@pytest.mark.parametrize("rare", [False, True])
def test_a_pass_checks_once_and_is_repeated_if_positive(rare: bool, waits: list[bool]) -> None:
    torch.manual_seed(0)
    model, memory = nn.Linear(64, 48), Memory()
    signs = torch.ones(8, 1) if not rare else (1 - 2.0 * (torch.arange(8) % 2))[:, None]
    # Positions that are nearly equal: with opposite signs, their gradients cancel.
    x = torch.randn(4, 1, 64).expand(4, 8, 64) + 1e-6 * torch.randn(4, 8, 64)

    def gradients(method: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = per_example_gradients((model(x) * signs).sum((1, 2)), trainable(model), memory, method)
        squares = found.squared_norms()
        ones_B = torch.ones(4, dtype=torch.float64)
        return squares, found.weighted_sums(dict.fromkeys(squares, ones_B))

    for _ in range(2):
        gradients("bookkeeping")
    expected = gradients("bookkeeping")
    waits.clear()
    found = gradients("reweight")
    assert any(waits) == rare
    assert rare or len(waits) <= 2  # each pass checks at most once, at its end
    for ours, theirs in zip(found, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
