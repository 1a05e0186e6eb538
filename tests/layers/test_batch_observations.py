"""Observations of a layer are attached to the graph of the losses only."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipwise.layers import BatchStatisticsNorm, without_running_statistics
from clipwise.layers.batch_statistics import observations, observed


def watched(*modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*modules)
    without_running_statistics(model)
    for layer in model:
        if isinstance(layer, BatchStatisticsNorm):
            layer.is_observed = True
    return model


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (2, 3, 4, 5), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mean_and_variance_of_each_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, x = nn.Identity(), torch.randn(shape).to(dtype)
    out = observed(x * 2, layer, x)
    assert torch.equal(out, x * 2)
    ((seen, edge),) = observations(out.sum())
    x_BCT = x.double().reshape(*shape[:2], -1)
    assert seen.layer is layer and seen.positions == x_BCT.shape[2]
    assert (seen.shape, seen.dtype) == (x.shape, dtype) and edge.node is out.grad_fn
    assert seen.mean_BC.dtype == (torch.float32 if dtype is torch.bfloat16 else dtype)
    torch.testing.assert_close(seen.mean_BC.double(), x_BCT.mean(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.var_BC.double(), x_BCT.var(2, correction=0), rtol=1e-5, atol=1e-6)
    assert not seen.mean_BC.requires_grad


def test_output_and_gradients_do_not_change() -> None:
    x = torch.randn(6, 3)
    found = []
    for is_observed in (False, True):
        torch.manual_seed(0)
        model = watched(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        model[1].is_observed = is_observed
        losses = model(x).square().squeeze(1)
        found.append([losses, *torch.autograd.grad(losses.mean(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_empty_batch_gives_no_warning() -> None:
    """A warning would reveal that the batch is empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((seen, _),) = observations(observed(torch.zeros(0, 3), nn.Identity(), torch.zeros(0, 3)))
    assert seen.mean_BC.shape == seen.var_BC.shape == (0, 3)


def test_every_pass_of_the_losses_and_no_other() -> None:
    model = watched(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model(torch.full((4, 3), 100.0))  # its losses are not used
    losses = model(torch.zeros(2, 3)) + model(torch.ones(2, 3))
    assert sorted(float(seen.mean_BC[0, 0]) for seen, _ in observations(losses)) == [0.0, 1.0]


def test_only_in_training_and_only_if_enabled() -> None:
    model, x = watched(nn.BatchNorm1d(3), nn.Linear(3, 1)), torch.randn(4, 3)
    assert len(list(observations(model(x)))) == 1
    assert not list(observations(model.eval()(x)))
    model.train()[0].is_observed = False
    assert not list(observations(model(x)))


@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_without_trained_predecessors_is_observed(affine: bool) -> None:
    model = watched(nn.BatchNorm1d(3, affine=affine).requires_grad_(False), nn.Linear(3, 1))
    assert len(list(observations(model(torch.randn(4, 3))))) == 1


def test_activation_checkpointing_gives_one_observation() -> None:
    model, head = watched(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    losses: Tensor = head(checkpoint(model, torch.randn(4, 3), use_reentrant=False)).squeeze(1)
    torch.autograd.grad(losses.mean(), list(model.parameters()), retain_graph=True)
    assert len(list(observations(losses))) == 1


@pytest.mark.slow
def test_observations_are_freed_with_the_graph() -> None:
    model = watched(nn.BatchNorm1d(3), nn.Linear(3, 1))
    losses = model(torch.randn(4, 3))
    ((seen, _),) = observations(losses)
    there = weakref.ref(seen)
    del losses, seen, _
    gc.collect()
    assert there() is None
