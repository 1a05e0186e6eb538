"""A second pass with weights shows whether a loss depends on the outputs of other examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.clipping.outputs import gradients_at_outputs
from clipwise.lipschitz import SoftmaxCrossEntropy

Loss = Callable[[Tensor, Tensor], Tensor]
Y = torch.tensor([2, 0, 1, 3, 3])

ROW_BY_ROW: dict[str, Loss] = {
    "cross-entropy": lambda o, y: F.cross_entropy(o, y, reduction="none"),
    "with a temperature": lambda o, y: SoftmaxCrossEntropy(0.1)(o, y),
    "with weights of classes": lambda o, y: F.cross_entropy(o, y, torch.rand(4), reduction="none"),
    "some targets left out": lambda o, y: F.cross_entropy(o, y, ignore_index=3, reduction="none"),
    "two ways": lambda o, y: F.cross_entropy(o, y, reduction="none") + o.sum(1),
    "a factor for each": lambda o, y: F.cross_entropy(o, y, reduction="none") * torch.rand(5),
    "in two steps, scaled": lambda o, y: 3 * F.nll_loss(F.log_softmax(o * 2.0, -1), y, reduction="none"),
}
COUPLED: dict[str, Loss] = {
    "along the batch": lambda o, y: F.nll_loss(F.log_softmax(o, 0), y, reduction="none"),
    "along the batch, counted from the end": lambda o, y: F.nll_loss(F.log_softmax(o, -2), y, reduction="none"),
    "a mean over the batch": lambda o, y: F.cross_entropy(o - o.mean(0), y, reduction="none"),
}


def outputs() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0


def gradient(losses: Tensor, o: Tensor) -> Tensor:
    return torch.autograd.grad(losses, o, torch.ones(5), retain_graph=True)[0]


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_losses_of_their_own_rows_are_accepted(name: str) -> None:
    o = outputs()
    losses = ROW_BY_ROW[name](o, Y)
    found, are_coupled = gradients_at_outputs(losses, o, {})
    assert not are_coupled and torch.equal(found, gradient(losses, o))


@pytest.mark.parametrize("name", COUPLED)
def test_losses_of_other_rows_are_found(name: str) -> None:
    o = outputs()
    assert bool(gradients_at_outputs(COUPLED[name](o, Y), o, {})[1])


def test_hooks_inside_the_loss_are_detected() -> None:
    """The operations are known, and a hook mixes the rows of their gradient."""
    for mixes in (lambda g: g + g.mean(0), lambda g: g / g.norm()):
        o = outputs()
        scores = o / 2.0
        losses = F.cross_entropy(scores, Y, reduction="none")
        scores.register_hook(mixes)
        assert bool(gradients_at_outputs(losses, o, {})[1])


def test_a_hook_on_a_node_of_the_loss_is_detected() -> None:
    o = outputs()
    losses = F.cross_entropy(o, Y, reduction="none")
    assert losses.grad_fn is not None
    losses.grad_fn.next_functions[0][0].register_hook(lambda made, taken: (made[0] + made[0].mean(0),))
    assert bool(gradients_at_outputs(losses, o, {})[1])


def test_what_is_not_a_number_is_put_to_the_test() -> None:
    with torch.no_grad():
        values = outputs()
        values[1] = torch.nan
    o = values.requires_grad_() * 1.0
    losses = F.cross_entropy(o, Y, reduction="none")
    assert not gradients_at_outputs(losses, o, {})[1]
