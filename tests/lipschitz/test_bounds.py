"""No example's gradient exceeds its bound, in thousands of random networks and under gradient ascent."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import layers
from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers.bounded import ClipInput
from clipwise.layers.replace_batchnorm import replace_batchnorm
from clipwise.lipschitz import bounds_of, clip_weights_, limits_of, trace
from tests.lipschitz.networks import draw, ratios

MANY = {"dense": 400, "convolutional": 300, "table": 150}


@pytest.mark.slow
@pytest.mark.parametrize("family", MANY)
@pytest.mark.filterwarnings("ignore")
def test_no_gradient_exceeds_its_bound(family: str) -> None:
    best = 0.0
    for seed in range(MANY[family]):
        model, shape = draw(family, seed)
        for name, ratio in ratios(model, shape, seed).items():
            assert ratio <= 1, f"network {seed}: {name} by {ratio}"
            best = max(best, ratio)
    assert best > 0.9  # bounds are reached, so a smaller one would be wrong


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "convolutional"])
@pytest.mark.filterwarnings("ignore")
def test_no_gradient_exceeds_its_bound_under_ascent(family: str) -> None:
    for seed in range(40):
        model, shape = draw(family, 10_000 + seed)
        for name, ratio in ratios(model, shape, seed, ascent=8).items():
            assert ratio <= 1, f"network {seed}: {name} by {ratio}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_gradient_exceeds_its_bound_in_float64() -> None:
    for seed in range(100):
        model, shape = draw("dense", seed, torch.float64)
        assert max(ratios(model, shape, seed).values()) <= 1


@pytest.mark.parametrize("limits", [{"1.weight": 3.0, "1.bias": 0.1}, {"1.weight": 0.1, "1.bias": 3.0}])
def test_fixed_limits_that_differ_within_a_layer_bound_it_by_the_larger_one(limits: dict[str, float]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(ClipInput(1.0), nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    network = trace(model, (3,))
    limits_by_name = limits_of(network, limits | {"2": 1.0})
    clip_weights_(network, limits_by_name)
    now, always = bounds_of(network, 1.0), bounds_of(network, 1.0, limits=limits_by_name)
    for name, bound in now.sensitivities.items():
        assert bound <= always.sensitivities[name] * (1 + 1e-9), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["dense", "convolutional", "table"])
def test_fixed_limits_bound_every_network_that_is_clipped_to_them(family: str) -> None:
    for seed in range(40):
        model, shape = draw(family, seed)
        network = trace(model, shape)
        limits = limits_of(network, 0.7)
        clip_weights_(network, limits)
        now, always = bounds_of(network, 1.0), bounds_of(network, 1.0, limits=limits)
        for name, bound in now.sensitivities.items():
            assert bound <= always.sensitivities[name] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_effort_never_gives_larger_bounds() -> None:
    for seed in range(60):
        model, shape = draw("convolutional", seed)
        network = trace(model, shape)
        usual, tight = (bounds_of(network, 1.0, effort=e) for e in ("spectral", "tight"))
        for name in usual.sensitivities:
            assert tight.sensitivities[name] <= usual.sensitivities[name] * (1 + 1e-9)


def test_an_mlp_has_the_bounds_of_the_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ClipInput(2.0), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    bounds = bounds_of(trace(model, (5,)), math.sqrt(2)).sensitivities
    w1, w2 = (float(torch.linalg.matrix_norm(model[i].weight.detach(), 2)) for i in (1, 3))
    hidden = min(w1 * 2 + float(model[1].bias.detach().norm()), 2.0)  # tanh: at most sqrt(4)
    expected = {
        "1.weight": math.sqrt(2) * w2 * 2,
        "1.bias": math.sqrt(2) * w2,
        "3.weight": math.sqrt(2) * hidden,
        "3.bias": math.sqrt(2),
    }
    assert bounds == pytest.approx(expected, rel=1e-8)


def test_a_constant_image_needs_the_count_of_windows() -> None:
    """All windows are equal, so their gradients add up to three times |x| |g|."""
    model = nn.Sequential(ClipInput(1.0), nn.Conv2d(1, 1, 3, padding=1, bias=False))
    outputs = model(torch.ones(1, 1, 20, 20))
    (g,) = torch.autograd.grad(outputs.sum() / 20, model[1].weight)
    bound = bounds_of(trace(model, (1, 20, 20)), 1.0).sensitivities["1.weight"]
    assert 2.8 < float(g.norm()) <= bound <= 3.01


class Branches(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.clip, self.first = ClipInput(1.0), nn.Linear(3, 3, bias=False)
        self.joined = joined

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.clip(x))
        return torch.cat([x, 2 * x], dim=1) if self.joined else x + 2 * x


def test_concatenated_branches_add_in_squares_and_summed_ones_linearly() -> None:
    for joined, gain in ((True, math.sqrt(5)), (False, 3.0)):
        bounds = bounds_of(trace(Branches(joined), (3,)), 1.0)
        assert bounds.sensitivities["first.weight"] == pytest.approx(gain, rel=1e-4)
        assert bounds.sensitivities["first.weight"] >= gain


def test_a_layer_that_is_used_twice_adds_its_uses() -> None:
    shared = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        shared.weight.copy_(2 * torch.eye(3))
    bounds = bounds_of(trace(nn.Sequential(ClipInput(1.0), shared, shared), (3,)), 1.0)
    assert bounds.sensitivities == {"1.weight": pytest.approx(2 * 1 + 1 * 2, rel=1e-4)}


def test_the_bias_of_a_convolution_sums_over_its_windows() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Conv2d(1, 1, 3, padding=1))
    bounds = bounds_of(trace(model, (1, 8, 8)), 1.0)
    assert bounds.sensitivities["1.bias"] == pytest.approx(8, rel=1e-3)
    assert bounds.together(["1.weight", "1.bias"]) == pytest.approx(math.hypot(3, 8), rel=1e-3)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d.*mixes examples"),
        (layers.BatchStatisticsNorm(4), "BatchStatisticsNorm.*mixes examples"),
        (layers.ReleasedStatisticsNorm(4), "ReleasedStatisticsNorm.*released deviation"),
        (nn.LayerNorm(4), "LayerNorm.*BoundedLayerNorm"),
        (nn.GroupNorm(1, 4), "GroupNorm.*BoundedGroupNorm"),
        (nn.LogSoftmax(1), "LogSoftmax.*logits"),
        (nn.Bilinear(4, 4, 2), "'1' .Bilinear.*no bound"),
        (nn.TransformerEncoderLayer(4, 2), "another strategy"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizedLinear"),
        (nn.Softmax(1), "no bound is known"),
    ],
)
def test_layers_without_a_bound_are_refused_by_name(layer: nn.Module, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        trace(nn.Sequential(ClipInput(1.0), layer), (4,))


class Function(nn.Module):
    """A function of a clipped input."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.clip, self.function = ClipInput(1.0), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.clip(x))  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x @ x.transpose(1, 2), "another strategy"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "another strategy"),
        (lambda x: x.exp(), "exp.*no bound"),
        (lambda x: 1 / x, "division"),
        (lambda x: x.flatten(0, 1), "each example"),
        (lambda x: x.transpose(0, 1), "each example"),
        (lambda x: x.permute(1, 0, 2), "each example"),
        (lambda x: x - x.mean(), "dim"),
        (lambda x: x - x.mean(dim=0), "each example"),
        (lambda x: torch.cat([x, x]), "each example"),
        (lambda x: x[0:1] + x, "each example"),
        (lambda x: x.flip(0), "flip"),
        (lambda x: x if x.sum() > 0 else -x, "cannot be traced"),
    ],
)
def test_functions_without_a_bound_are_refused_by_name(function: object, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        trace(Function(function), (3, 4))


def test_an_untraceable_module_is_named() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Function(lambda x: x if x.sum() > 0 else -x))
    with pytest.raises(UnsupportedModelError, match=r"'1\.1' \(Function\): it cannot be traced"):
        trace(nn.Sequential(ClipInput(1.0), inner), (4,))


def test_layers_with_public_statistics_are_refused_by_name() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 3), nn.BatchNorm1d(3))
    replace_batchnorm(model, torch.randn(5, 4))
    with pytest.raises(UnsupportedModelError, match=r"'2' \(PublicBatchNorm\).*BoundedGroupNorm"):
        trace(model, (4,))


def test_an_input_that_is_not_clipped_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'0' gets inputs of unbounded norm.*ClipInput"):
        trace(nn.Sequential(nn.Linear(3, 2)), (3,))


def test_hooks_and_tables_with_max_norm_are_refused() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(3, 2))
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"'1' \(Linear\): it has hooks"):
        trace(model, (3,))
    handle.remove()
    trace(model, (3,))
    with pytest.raises(UnsupportedModelError, match="max_norm changes the rows"):
        trace(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), (4,))


def test_an_in_place_change_of_a_shared_value_is_refused() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip, self.linear = ClipInput(1.0), nn.Linear(3, 3)
            self.act = nn.SELU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(self.clip(x))
            return self.act(x) + x

    with pytest.raises(UnsupportedModelError, match="in place"):
        trace(Careless(), (3,))


def test_weights_that_are_not_finite_and_wrong_arguments_are_refused() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(3, 2))
    network = trace(model, (3,))
    with pytest.raises(ConfigurationError, match="loss_constant"):
        bounds_of(network, math.inf)
    with pytest.raises(ConfigurationError, match="effort"):
        bounds_of(network, 1.0, effort="power")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="input_shape"):
        trace(model, (4,))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    with pytest.raises(UnsupportedModelError, match="'1' can be infinite"):
        bounds_of(network, 1.0)
    with warnings.catch_warnings(), pytest.raises(UnsupportedModelError, match="float32 or float64"):
        trace(nn.Sequential(ClipInput(1.0), nn.Linear(3, 2)).bfloat16(), (3,))
