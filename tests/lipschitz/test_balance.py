"""Rescaling pairs of layers keeps the outputs bit by bit and reduces the noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipwise import Lipschitz
from clipwise.errors import ConfigurationError
from clipwise.layers import ClipInput
from clipwise.lipschitz import bounds_of, limits_of, trace
from clipwise.lipschitz.bounds import measured_norms
from clipwise.lipschitz.matrix_norms import measured_together
from clipwise.lipschitz.weights import balance_, pairs_of
from experiments.lip_dp_sgd.bound_tightness import noise_of
from tests.clipping.test_lipschitz import train
from tests.runs import CLASSES, FEATURES, private_run

LIMIT = 100.0


def image_network(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ClipInput(1.0),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU() if activation is None else activation,
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 3),
    )


def balanced(model: nn.Module, limit: float = LIMIT) -> tuple[float, float, dict[str, float]]:
    """The noise before and after."""
    network = trace(model, (1, 8, 8))
    pairs = pairs_of(network, dict(model.named_parameters()))
    bounds, norms = bounds_of(network, 1.0), measured_norms(network, "spectral")
    moved = balance_(network, pairs, bounds, norms, limits_of(network, limit), "spectral")
    after = bounds_of(network, 1.0)
    for op, found in measured_norms(network, "spectral").items():
        for name, value in found.items():
            assert value <= norms[op][name] <= value * (1 + 1e-9) + 1e-30  # updated
    return noise_of(bounds, network), noise_of(after, network), moved


@pytest.mark.parametrize("factor", [1e-3, 1.0, 50.0])
def test_outputs_stay_and_noise_shrinks(factor: float) -> None:
    model = image_network().eval()
    with torch.no_grad():
        for p in model[1].parameters():
            p.mul_(factor)
    x = torch.randn(5, 1, 8, 8)
    outputs = model(x)
    before, after, moved = balanced(model)
    assert torch.equal(outputs, model(x))
    assert moved and after < 0.97 * before
    assert not balanced(model)[2]  # a second call changes nothing


def test_the_noise_reaches_its_minimum() -> None:
    """Without biases each term is a product over a_k: the minimal sum is K times their geometric mean."""
    torch.manual_seed(1)
    model = nn.Sequential(ClipInput(1.0), nn.Linear(20, 9, bias=False), nn.ReLU(), nn.Linear(9, 3, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(0.01)
    network = trace(model, (20,))
    bounds, norms = bounds_of(network, 1.0), measured_norms(network, "spectral")
    terms = [bounds.sensitivities[n] * p.numel() ** 0.5 for n, p in model.named_parameters()]
    balance_(
        network, pairs_of(network, dict(model.named_parameters())), bounds, norms, limits_of(network, LIMIT), "spectral"
    )
    found = noise_of(bounds_of(network, 1.0), network)
    least = 2 * (terms[0] * terms[1]) ** 0.5
    assert least * (1 - 1e-6) <= found <= 1.17 * least < 0.5 * sum(terms)


@pytest.mark.slow
def test_weights_stay_within_their_limits() -> None:
    model = image_network()
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
    balanced(model, limit=2.0)
    network = trace(model, (1, 8, 8))
    for op in network.operations:
        assert all(norm <= 2.0 for norm in measured_together(list(op.rule.limited("spectral").values())))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.clip, self.a, self.b = ClipInput(1.0), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.a(self.clip(x))
        return first + self.b(first.relu())


def test_factors_move_only_where_the_network_stays_the_same() -> None:
    tanh = trace(image_network(nn.Tanh()), (1, 8, 8))
    everything = dict(tanh.graph.named_parameters())
    assert [(first.where, second.where) for first, second in pairs_of(tanh, everything)] == [("4", "8")]
    assert pairs_of(tanh, {"8.weight": 0, "8.bias": 0}) == []  # frozen parameters stay
    model = Twice()
    assert pairs_of(trace(model, (4,)), dict(model.named_parameters())) == []


def test_a_layer_that_is_used_twice_keeps_its_scale() -> None:
    shared = nn.Linear(4, 4)
    network = trace(nn.Sequential(ClipInput(1.0), shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2)), (4,))
    assert not pairs_of(network, dict(network.graph.named_parameters()))


@pytest.mark.parametrize("first", [1e-4, 1e4])
def test_no_factor_moves_weights_above_a_tight_limit(first: float) -> None:
    """The optimal factor would be a hundred or more, and the limit allows 4."""
    torch.manual_seed(0)
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    norms = (first, 1.0) if first < 1 else (1.0, 1e-4)
    for layer, norm in zip((model[1], model[3]), norms, strict=True):
        nn.init.eye_(layer.weight)
        layer.weight.data.mul_(norm)
    network = trace(model, (4,))
    limits = {"1.weight": 4.1 * norms[0], "3.weight": 4.1 * norms[1]}
    pairs = pairs_of(network, dict(model.named_parameters()))
    bounds, measured = bounds_of(network, 1.0), measured_norms(network, "spectral")
    assert balance_(network, pairs, bounds, measured, limits, "spectral")
    for name, p in model.named_parameters():
        assert float(torch.linalg.matrix_norm(p.detach().double(), 2)) <= limits[name]


def test_a_run_can_be_balanced() -> None:
    noise = []
    for is_balanced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(ClipInput(1.0), nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES))
        with torch.no_grad():
            model[1].weight.mul_(0.05)
            model[1].bias.zero_()
        _, private = private_run(model, clipping=Lipschitz(20.0, 1.0, balanced=is_balanced))
        noise.append(sum(p.noise_std**2 * private._context.parameters[p.name].numel() for p in private.parts()) ** 0.5)
        train(model, private, 3)
        fresh = bounds_of(trace(model, (FEATURES,)), 2**0.5).sensitivities
        for part in private.parts():
            assert fresh[part.name] * (1 - 1e-9) <= part.sensitivity <= fresh[part.name] * (1 + 1e-5)
    assert noise[1] < 0.7 * noise[0]
    with pytest.raises(ConfigurationError, match="balanced"):
        Lipschitz(1.0, 1.0, fixed=True, balanced=True)


def test_averages_are_rescaled_too() -> None:
    """Otherwise the average would mix weights of different scales."""
    torch.manual_seed(0)
    model = nn.Sequential(ClipInput(1.0), nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clipping = Lipschitz(LIMIT, 1.0, balanced=True)
    _, private = private_run(model, optimizer, clipping=clipping, ema=0.9)
    train(model, private, 3)
    averages = private.ema
    factors = {"1.weight": 64.0, "1.bias": 64.0, "3.weight": 1 / 64}
    with torch.no_grad():  # weights and averages with unequal scales
        for name, factor in factors.items():
            model.get_parameter(name).mul_(factor)
    averages.scale(factors)
    x, before = torch.randn(5, FEATURES), model[1].weight.detach().clone()
    expected = model(x)
    train(model, private, 3)
    assert float(model[1].weight.norm()) < 0.1 * float(before.norm())  # they were rescaled
    assert torch.allclose(model(x), expected)
    with averages.applied():
        torch.testing.assert_close(model(x), expected)
