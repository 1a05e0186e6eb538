"""Signal and noise per layer are those of the release."""

import math

import pytest
import torch

from experiments.backprop_clipping.sets import images
from experiments.backprop_clipping.signal import measured
from experiments.backprop_clipping.training import begun
from experiments.backprop_clipping.trial import Trial


@pytest.fixture(scope="module")
def digits():
    return images("digits", None, torch.device("cpu"), "validation")


@pytest.mark.parametrize("method", ["dp-sgd-relu", "dp-sgd-layer", "gradient-normalize", "upstream-clip"])
def test_each_layer_has_its_share(digits, method):
    trial = Trial("digits", method, 8.0, 1 / 4, 1, max_norm=0.01, input_norm=2.0, grad_norm=1e-3)
    training = begun(trial, digits, 0)
    found = measured(training, trial, digits)
    assert list(found) == ["0", "3", "7", "9"]  # the layers with weights, in order
    parts = {p.parameters[0].split(".")[0]: p for p in training.private.parts()}
    divisor = len(digits.train) / 4
    for name, layer in found.items():
        part = parts.get(name, next(iter(parts.values())))
        weights = training.model[int(name)]
        size = sum(p.numel() for p in weights.parameters())
        assert math.isclose(layer["noise"], part.noise_std * math.sqrt(size) / divisor, rel_tol=1e-4)
        # The mean of what is at most S long is no longer. Gradients are not clipped, and here they are longer.
        assert 0 < layer["signal"] <= part.sensitivity
        assert layer["gradient"] > 0
        assert ("passed" in layer) == (not method.startswith("dp-sgd"))
    if method == "upstream-clip":  # the gradient after the clip of the last layer is at most |W| C2
        most = 1e-3 * float(torch.linalg.matrix_norm(training.model[9].layer.weight, 2))
        assert 0 < found["7"]["passed"] <= most
    if method == "dp-sgd-relu":
        assert math.hypot(*(layer["signal"] for layer in found.values())) <= 0.01


def test_what_is_not_clipped_is_the_plain_gradient(digits):
    """Of a clipped network, with clips so wide that they do nothing."""
    trial = Trial("digits", "gradient-clip", 8.0, 1 / 4, 1, input_norm=1e4, grad_norm=1e4)
    found = measured(begun(trial, digits, 0), trial, digits)
    for layer in found.values():
        assert math.isclose(layer["signal"], layer["gradient"], rel_tol=1e-4)
