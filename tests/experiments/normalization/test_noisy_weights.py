"""Noisy weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from clipwise.clipping import PerExample
from clipwise.errors import ConfigurationError
from clipwise.layers import standardize_weights
from experiments.normalization.noisy_weights import NoisyWeights, with_noisy_weights
from tests.layers.normalized import sound
from tests.sites import site

MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 2), (6, 2, 4, 4)),
    "lstm": (lambda: nn.LSTM(4, 3, bidirectional=True), (5, 6, 4)),
    "cell": (lambda: nn.GRUCell(4, 3), (6, 4)),
    "standardized": (lambda: standardize_weights(nn.Conv2d(2, 3, 2)), (6, 2, 4, 4)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (6, 4)),
}


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_each_pass_draws_anew_in_training_and_evaluation(name: str, training: bool) -> None:
    build, shape = MODELS[name]
    model, x = with_noisy_weights(build(), 0.5).train(training), torch.randn(shape)
    one, other = output(model, x), output(model, x)
    assert not torch.allclose(one, other)
    quiet = with_noisy_weights(build(), 0.0).train(training)
    torch.testing.assert_close(output(quiet, x), output(quiet, x))


def test_the_draws_have_the_mean_and_the_deviation() -> None:
    torch.manual_seed(0)
    model = with_noisy_weights(nn.Linear(20, 10), 0.3)
    mean = model.parametrizations.weight.original.detach()
    drawn = torch.stack([model.weight.detach() for _ in range(400)])
    assert float((drawn.mean(0) - mean).abs().max()) < 5 * 0.3 / 20
    assert float((drawn - mean).std()) == pytest.approx(0.3, rel=0.01)


def test_the_gradient_of_the_mean_is_that_of_the_draw() -> None:
    model, x = with_noisy_weights(nn.Linear(3, 1, bias=False), 2.0), torch.randn(5, 3)
    model(x).sum().backward()
    torch.testing.assert_close(model.parametrizations.weight.original.grad, x.sum(0, keepdim=True))
    assert [n for n, _ in model.named_parameters()] == ["parametrizations.weight.original"]


def test_private_training_with_noisy_weights_works() -> None:
    model, x = with_noisy_weights(nn.Linear(3, 1), 2.0), torch.randn(5, 3)
    clipper = PerExample(0.5).attach(site(model))
    lengths = (x.square().sum(1) + 1).sqrt()
    for _ in range(3):
        total = clipper.clipped_sum(model(x)[:, 0])
        expected = ((0.5 / lengths).clamp(max=1)[:, None] * x).sum(0, keepdim=True)
        torch.testing.assert_close(total["parametrizations.weight.original"], expected)


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [({}, ["in_proj_weight"]), ({"kdim": 3, "vdim": 5}, ["q_proj_weight", "k_proj_weight", "v_proj_weight"])],
)
def test_every_projection_of_attention_is_drawn(sizes: dict[str, int], keys: list[str]) -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2, add_bias_kv=True, **sizes))
    layer = with_noisy_weights(model, 0.5)[0]
    for module, key in [(layer.out_proj, "weight"), *((layer, key) for key in keys)]:
        assert not torch.equal(getattr(module, key), getattr(module, key)), key
    assert not parametrize.is_parametrized(layer, "bias_k")
    q, k, v = (torch.randn(3, 1, width) for width in (4, sizes.get("kdim", 4), sizes.get("vdim", 4)))
    assert not torch.equal(layer(q, k, v)[0], layer(q, k, v)[0])


def test_a_second_call_gives_another_deviation() -> None:
    model = with_noisy_weights(with_noisy_weights(nn.Linear(30, 40), 3.0), 0.1)
    assert len(model.parametrizations.weight) == 1
    mean = model.parametrizations.weight.original
    assert float((model.weight - mean).detach().std()) == pytest.approx(0.1, rel=0.2)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(2, 3), nn.Parameter(torch.zeros(3, 2))
        self.words, self.norm = nn.Embedding(3, 3), nn.LayerNorm((2, 3))


def test_weights_that_would_get_no_noise_are_refused_by_name() -> None:
    model = nn.Sequential(Own())
    with pytest.raises(ConfigurationError, match=r"'table' of '0' \(Own\) would stay without noise"):
        with_noisy_weights(model, 1.0)
    assert not parametrize.is_parametrized(model[0].first)  # the model is unchanged
    parametrize.register_parametrization(model[0], "table", NoisyWeights(0.0))
    with_noisy_weights(model, 1.0)
    assert model[0].table.any()
    assert not parametrize.is_parametrized(model[0].words) and not parametrize.is_parametrized(model[0].norm)
    with pytest.warns(FutureWarning):
        hooked = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ConfigurationError, match=r"'0' .*a hook makes its weights of 'weight_g'"):
        with_noisy_weights(hooked, 1.0)


def test_invalid_arguments_are_refused() -> None:
    for std in (-1.0, float("nan"), float("inf"), "a", None, True):
        with pytest.raises(ConfigurationError, match="std must be"):
            with_noisy_weights(nn.Linear(2, 2), std)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="std must be"):
            NoisyWeights(std)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no linear"):
        with_noisy_weights(nn.ReLU(), 1.0)
    with pytest.raises(ConfigurationError, match=r"'1'.*other draws"):
        with_noisy_weights(sound("public")[0], 1.0)
