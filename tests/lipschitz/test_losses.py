"""The constants of losses are never exceeded, and are reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clipwise.errors import ConfigurationError
from clipwise.lipschitz import (
    BoundedLoss,
    CosineSimilarity,
    Huber,
    Logistic,
    MulticlassHinge,
    SoftmaxCrossEntropy,
    clip_output_gradients,
)
from clipwise.lipschitz.losses import constant_of

CLASSES = 10
LABELS: list[BoundedLoss] = [SoftmaxCrossEntropy(), SoftmaxCrossEntropy(temperature=4.0), MulticlassHinge()]
VALUES: list[BoundedLoss] = [Huber(), Huber(0.3), Logistic(), CosineSimilarity(0.5)]


def gradients(loss: BoundedLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.detach().requires_grad_()
    losses = loss(outputs, targets)
    assert losses.shape == (len(outputs),)
    return torch.autograd.grad(losses.sum(), outputs)[0]


@pytest.mark.parametrize("loss", [*LABELS, *VALUES], ids=repr)
def test_no_gradient_exceeds_the_constant_and_some_reach_it(loss: BoundedLoss) -> None:
    torch.manual_seed(0)
    best, constant = 0.0, loss.constant((CLASSES,))
    for scale in (0.0, 0.01, 1.0, 100.0):
        z = torch.randn(2000, CLASSES, dtype=torch.float64) * scale
        if loss in LABELS:
            targets = torch.randint(0, CLASSES, (2000,))
        else:
            targets = torch.rand(2000, CLASSES, dtype=torch.float64).round()
            targets[:, 0] = 1  # no target of length 0
            z[1] = 1e4 * (1 - 2 * targets[1])  # all wrong
        best = max(best, float(gradients(loss, z, targets).norm(dim=1).amax()))
        assert best <= constant * (1 + 1e-12)
    assert best >= 0.99 * constant


def test_a_loss_per_position_scales_with_the_root_of_the_positions() -> None:
    loss = SoftmaxCrossEntropy()
    z = torch.zeros(2, 3, 4, dtype=torch.float64)
    z[:, 1] = 100.0
    g = gradients(loss, z, torch.zeros(2, 4, dtype=torch.long))
    assert g.flatten(1).norm(dim=1).tolist() == pytest.approx([loss.constant((3, 4))] * 2)


def test_a_scaled_or_wrong_loss_is_clipped_and_a_correct_one_is_not() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.inf, 0.0], [math.nan, 1.0], [0.0, 0.0], [3e30, 4e30]])
    found = clip_output_gradients(g, 1.0)
    expected = [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]
    assert torch.allclose(found, torch.tensor(expected))
    assert torch.equal(found[1], g[1])


def test_a_gradient_whose_scale_float32_would_round_up_counts_as_zero() -> None:
    for power in torch.arange(37, 38.5, 0.01).tolist():
        g = torch.tensor([[10.0**power]])
        assert float(clip_output_gradients(g, 1e-7)) <= 1e-7
        assert float(clip_output_gradients(g.double(), 1e-7)) == pytest.approx(1e-7, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SoftmaxCrossEntropy(0.0), "temperature"),
        (lambda: CosineSimilarity(0.0), "floor"),
        (lambda: Huber(math.inf), "delta"),
        (lambda: MulticlassHinge(margin=math.nan), "margin"),
        (lambda: MulticlassHinge().constant((3, 4)), r"\(examples, classes\).*\(3, 4\)"),
    ],
)
def test_settings_without_a_constant_are_refused(make: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("loss", VALUES, ids=repr)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 2)])
def test_targets_must_have_the_shape_of_outputs(loss: BoundedLoss, shape: tuple[int, ...]) -> None:
    """(5, 1) and (5,) would broadcast to (5, 5): every output against every target."""
    with pytest.raises(ConfigurationError, match="view_as"):
        loss(torch.zeros(5, 1), torch.zeros(shape))


class Stated(BoundedLoss):
    """A loss with the given constant."""

    def __init__(self, constant: Any) -> None:
        self.stated = constant

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1)

    def constant(self, shape: Sequence[int]) -> float:
        return self.stated  # type: ignore[no-any-return]


@pytest.mark.parametrize("stated", [-1.0, 0.0, math.nan, math.inf, "1", None, torch.tensor([1.0, 2.0])])
def test_a_constant_that_bounds_nothing_is_refused(stated: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Stated\.constant\(\(3,\)\) must be a finite number that is greater than 0"
    ):
        constant_of(Stated(stated), (3,))
    assert constant_of(Stated(np.float32(2.0)), (3,)) == 2.0
