"""Captured passes of a model."""

import pytest
import torch
from torch import nn

from clipwise.reproduce.graphed import graphed

X = torch.rand(8, 1, 4, 4)


def network(device="cpu"):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Flatten(), nn.Linear(12, 2)).to(device)


def test_without_cuda_it_is_the_model_itself():
    model = network()
    assert graphed(model, X) is model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_pass_gives_the_same_gradients_as_weights_move():
    model = network("cuda")
    x = X.cuda()
    forward = graphed(model, x)
    assert forward is not model
    for _ in range(3):
        found = torch.autograd.grad(forward(x).square().mean(), list(model.parameters()))
        right = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            for p, g in zip(model.parameters(), right, strict=True):
                p -= 0.1 * g
    torch.testing.assert_close(forward(x[:3]), model(x[:3]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_with_buffers_is_left_as_it_is():
    model = nn.Sequential(nn.BatchNorm2d(1)).cuda()
    assert graphed(model, X.cuda()) is model
