"""A penalty on the weights is added after the noise, whatever the strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, StepError
from clipwise.report import wording
from tests.runs import gradients, losses_of, private_run, train


def ridge(model: nn.Module) -> Tensor:
    return 0.5 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def test_its_gradient_is_added_to_the_noised_one() -> None:
    found = []
    for penalty in (None, ridge):
        model, private = private_run(penalty=penalty)
        private._context.keys.key = type(private._context.keys.key).from_seed(1, b"the same noise")
        assert private.backward(losses_of(model, next(iter(private.loader))))
        found.append(gradients(model))
    for name, p in model.named_parameters():
        assert torch.allclose(found[1][name], found[0][name] + p.detach(), rtol=1e-5, atol=1e-6)


def test_a_run_continues_with_it() -> None:
    model, private = private_run(penalty=ridge)
    train(model, private, 3)
    assert private.steps == 3 and private.state_dict()["configuration"]["penalty"] == "ridge"


@pytest.mark.parametrize(
    "bad",
    [
        lambda m: 1.0,
        lambda m: torch.ones(()),
        lambda m: torch.ones((), requires_grad=True),
        lambda m: m[0].bias,
        lambda m: m.no_such_layer,
        lambda m: m[0].weight.sum() * torch.nan,
        lambda m: (m[0].weight * 0).sum().sqrt(),
        len,
        0.1,
    ],
)
def test_what_is_no_penalty_is_refused_before_anything_is_released(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="penalty"):
        private_run(penalty=bad)


def test_a_later_error_is_refused_then() -> None:
    values = iter([ridge, lambda model: 1.0])
    model, private = private_run(penalty=lambda model: next(values)(model))
    with pytest.raises(StepError, match="penalty must return a single number"):
        private.step(losses_of(model, next(iter(private.loader))))
    assert private.steps == 1  # charged all the same


@pytest.mark.parametrize("late", [lambda m: ridge(m) * torch.inf, lambda m: (m[0].weight * 0).sum().sqrt()])
def test_one_that_is_not_finite_later_leaves_the_weights_alone(late: Any) -> None:
    values = iter([ridge, late])
    model, private = private_run(penalty=lambda model: next(values)(model))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StepError, match="penalty or its gradient is not finite"):
        private.step(losses_of(model, next(iter(private.loader))))
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_the_statement_assumes_that_it_looks_at_no_record() -> None:
    for penalty in (None, ridge):
        model, private = private_run(penalty=penalty)
        train(model, private, 1)
        assert (wording.PENALISED in str(private.statement()).replace("\n" + " " * 15, " ")) is (penalty is not None)
        assert (wording.PENALISED in private.statement().to_dict()["assumptions"]) is (penalty is not None)
