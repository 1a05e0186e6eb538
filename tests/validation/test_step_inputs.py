"""Wrong parameters, optimizers and losses are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipwise.errors import ConfigurationError, StepError
from clipwise.validation.step_inputs import require_losses, require_real, trainable_parameters

B, T, D = 7, 4, 5


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# Parameters


def test_trainable_parameters_are_those_of_model_and_optimizer() -> None:
    model = nn.Linear(D, 2)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight", "bias"]
    model.bias.requires_grad_(False)
    assert list(trainable_parameters(model, sgd(*model.parameters()))) == ["weight"]


def test_wrong_parameters_are_refused_by_name() -> None:
    model = nn.Linear(D, 2)
    everything = sgd(*model.parameters())
    for bad, words in (
        ((lambda x: x, everything), "torch.nn.Module"),
        ((model, list(model.parameters())), "torch.optim.Optimizer"),
        ((model, sgd(model.weight)), "'bias' is trainable but the optimizer"),
        ((model, sgd(*model.parameters(), nn.Parameter(torch.zeros(7)))), r"\(7,\)"),
        ((nn.Linear(D, 2).requires_grad_(False), everything), "no trainable parameter"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainable_parameters(*bad)  # type: ignore[arg-type]


def test_complex_parameters_are_refused_where_a_strategy_does_not_take_them() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    found = trainable_parameters(model, sgd(*model.parameters()))
    with pytest.raises(ConfigurationError, match=r"'w' is torch\.complex64, and clipping=Lipschitz"):
        require_real(found, "Lipschitz")


# Losses

GOOD = torch.ones(B, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0] * B, "must be a tensor"),
        (GOOD.mean(), "single number"),
        (GOOD[:, None].expand(B, T), "2 dimensions"),
        (GOOD[:, None].expand(B, B), "pair of examples"),
        (GOOD[1:], "one entry for each example"),
        (torch.cat([GOOD, GOOD]), "one entry for each example"),
        (torch.ones(B, dtype=torch.long), "real floating point"),
        (torch.ones(B, dtype=torch.complex64), "real floating point"),
        (GOOD.detach(), "no gradient"),
    ],
)
def test_losses_that_are_not_one_per_example_are_refused(losses: object, words: str) -> None:
    with pytest.raises(StepError, match=words) as error:
        require_losses(losses, B)
    assert str(B) not in str(error.value), "the realised batch size is secret"


def test_one_loss_per_example_is_accepted() -> None:
    assert require_losses(GOOD, B) is GOOD
    assert len(require_losses(GOOD[:0], 0)) == 0
