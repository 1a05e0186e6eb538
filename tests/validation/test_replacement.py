"""The replacement test finds all kinds of coupling, and accepts rounding."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import CoupledExamplesError
from clipwise.sampling.batch_structure import take_rows
from clipwise.validation.check import check
from clipwise.validation.random_state import fixed_random_state, random_state_now, with_other_tensors
from clipwise.validation.replacement import Trial
from tests.validation.cases import APART, COUPLED, B, D, as_mapping, losses_of, perceptron, vectors


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_are_refused(name: str) -> None:
    torch.manual_seed(0)
    case = COUPLED[name]
    report = check(case.build(), case.loss, case.draw())
    assert not report.ok, name


@pytest.mark.parametrize("name", APART)
def test_rounding_and_random_numbers_are_no_coupling(name: str) -> None:
    torch.manual_seed(0)
    case = APART[name]
    for _ in range(3):
        report = check(case.build(), case.loss, case.draw())
        assert report.ok, report


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("causal if any is padded", "The loss of an example moved when"),
        ("a loop until all have converged", "The loss of an example moved when"),
        ("the index in the batch", "order of the batch"),
        ("the number of examples", "removed from the batch"),
        ("scaled gradients", "The gradient of an example moved (with random weights"),
        ("a gate at zero", "with random weights"),
    ],
)
def test_a_refusal_names_what_moved_and_when(name: str, words: str) -> None:
    torch.manual_seed(0)
    case = COUPLED[name]
    assert words in str(check(case.build(), case.loss, case.draw()))


def test_one_text_without_padding_is_enough() -> None:
    """Every example of a small batch is compared alone."""
    case = COUPLED["causal if any is padded"]
    for row in range(B):
        x, y = case.draw()
        x = x.clamp_min(1)
        x[:, -1] = 0
        x[row, -1] = 1
        assert not check(case.build(), case.loss, (x, y)).ok


@pytest.mark.parametrize("name", ["perceptron", "dropout", "attention"])
def test_a_batch_may_be_a_mapping(name: str) -> None:
    case = APART[name]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return case.loss(model, batch["x"], batch["y"])

    model, batch = case.build(), as_mapping(case.draw())
    assert check(model, loss, batch).ok
    assert not check(model, lambda m, b: loss(m, b) / len(b["x"]), batch).ok
    assert check(model, loss, batch | {"rate": torch.tensor(0.1), "nothing": None, "texts": ["a"] * B}).ok


def test_a_batch_may_be_a_tensor() -> None:
    assert check(perceptron(), lambda m, x: m(x).square().sum(1), torch.randn(B, D)).ok


def test_a_loss_that_fails_on_parts_of_the_batch_gives_a_note() -> None:
    def needs_four(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 4:
            raise ValueError(f"only {len(x)} of them")
        return losses_of(model, x, y)

    report = check(perceptron(), needs_four, vectors())
    assert report.ok and any("fails on some parts" in note for note in report.notes)
    assert len(report.notes) == len(set(report.notes)) and "only" not in str(report)


def test_losses_that_drift_from_call_to_call_are_accepted() -> None:
    """For instance with a factor that grows slowly from call to call."""
    calls: list[None] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(None)
        return losses_of(model, x, y) * (1 + 6e-7 * len(calls))

    assert check(perceptron(), loss, vectors()).ok


def test_a_nan_loss_does_not_hide_coupling_of_others() -> None:

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        broken = torch.zeros(len(x)).masked_fill(torch.arange(len(x)) == len(x) - 1, torch.nan)
        return losses_of(model, x, y) * (1 + x.detach().abs().mean()) + broken * 0

    assert not check(perceptron(), loss, vectors()).ok


def test_model_and_random_state_are_restored() -> None:
    model = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Dropout(0.5), nn.Linear(8, 3))
    before = {name: (id(t), t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    modes = [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    x, y = vectors()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    trial = Trial(model, lambda batch: losses_of(model, *batch), lambda at: take_rows((x, y), at, B), B)
    with pytest.raises(CoupledExamplesError):
        trial.require_uncoupled()
    with pytest.raises(CoupledExamplesError):
        trial.with_random_weights(probe_inputs=True)
    for name, t in model.state_dict(keep_vars=True).items():
        identity, version, values = before[name]
        assert id(t) == identity and t._version == version and torch.equal(t, values)
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.modules()] == modes
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(now[0], states[0]) and now[1:] == states[1:]


def test_a_fixed_random_state_repeats_every_generator() -> None:
    def drawn() -> list[Any]:
        with fixed_random_state(3):
            return [torch.rand(2).tolist(), random.random(), np.random.rand(), random_state_now()]

    assert drawn() == drawn()
    with fixed_random_state(3):
        torch.rand(2), random.random(), np.random.rand()
        assert random_state_now() == drawn()[-1]
        np.random.rand()
        assert random_state_now() != drawn()[-1]


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            assert self.head.weight is self.words.weight
            return self.head(self.words(x))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).transpose(1, 2), x, reduction="none").sum(1)

    report = check(Tied(), loss, (torch.randint(0, 7, (B, 3)),))
    assert report.ok and not report.notes


def test_the_models_tensors_are_restored_after_an_error() -> None:
    model = perceptron()
    weight = model[0].weight

    def fails() -> None:
        assert model[0].weight is not weight
        raise ValueError

    with pytest.raises(ValueError):
        with_other_tensors(model, {"0.weight": torch.zeros_like(weight)}, fails)
    assert model[0].weight is weight
