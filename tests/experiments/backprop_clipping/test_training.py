"""One run: steps, pieces of batches, rates, and what a run without noise does."""

import math

import pytest
import torch

from experiments.backprop_clipping import training
from experiments.backprop_clipping.sets import images
from experiments.backprop_clipping.training import begun, run
from experiments.backprop_clipping.trial import Trial
from experiments.harness.limits import Deadline, OutOfTimeError


@pytest.fixture(scope="module")
def digits():
    return images("digits", None, torch.device("cpu"), "validation")


@pytest.mark.parametrize("method", ["gradient-normalize", "dp-sgd-tanh"])
def test_a_step_is_one_release_however_many_pieces(digits, method, monkeypatch):
    monkeypatch.setattr(training, "piece_of", lambda _: 50)
    found = begun(Trial("digits", method, 8.0, 1 / 2, 1), digits, 0)
    before = [p.detach().clone() for p in found.model.parameters()]
    found.step()
    assert found.private.steps == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, found.model.parameters(), strict=True))
    found.step()
    assert found.private.steps == 2 == found.steps


def test_colour_images_come_in_pieces(digits):
    assert training.piece_of(digits) is None
    assert training.piece_of(training.Images("cifar10", digits.train, digits.held_out)) == 1024


def test_the_rate_of_sgd_is_over_what_one_example_can_move(digits):
    def rate(trial):
        return training._optimizer(trial, training.network(trial, digits, 0)).param_groups[0]["lr"]

    assert math.isclose(rate(Trial("digits", "dp-sgd-relu", 8.0, 1 / 2, 1, "sgd", 0.4, max_norm=0.1)), 4.0)
    layers = Trial("digits", "gradient-clip", 8.0, 1 / 2, 1, "sgd", 0.4, input_norm=2.0, grad_norm=0.1)
    # Four layers of weights, 0.2 each: 0.4 in all.
    assert math.isclose(rate(layers), 1.0)


def test_without_noise_the_gradient_is_the_clipped_one(digits):
    """|sum of clipped gradients| / batch is at most C1 C2 in each layer, whatever the losses."""
    trial = Trial("digits", "clipped", None, 1 / 2, 1, input_norm=2.0, grad_norm=1e-3)
    found = begun(trial, digits, 0)
    found.step()
    for p in found.model.parameters():
        assert 0 < float(p.grad.norm()) <= 2e-3
    assert found.private is None and found.cost()["epsilon"] is None


def test_a_run_without_time_leaves_nothing(digits):
    with pytest.raises(OutOfTimeError):
        run(Trial("digits", "plain", None, 1 / 2, 1), digits, 0, Deadline(0))
