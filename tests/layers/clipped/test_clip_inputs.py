"""Which layers can be clipped: unmodified instances of the supported classes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from clipwise import Backprop
from clipwise.errors import UnsupportedModelError
from clipwise.layers import ClippedLayer, clip_inputs
from tests.runs import CLASSES, FEATURES, HIDDEN, private_run, train


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def weight_normed(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's newer version is a parametrization
        nn.utils.weight_norm(layer)


OWN_CODE: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda m, given, out: 100 * out),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda m, given: (100 * given[0],)),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda m, into, out: None),
    "backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(lambda m, out: None),
    "forward": lambda layer: setattr(layer, "forward", torch.tanh),
    "weight_norm": weight_normed,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("what", OWN_CODE)
def test_code_that_would_not_be_called_is_refused_by_the_name_of_its_layer(what: str) -> None:
    model = network()
    OWN_CODE[what](model[2])
    message = r"Layer '2' \(Linear\) has hooks or an overridden forward"
    with pytest.raises(UnsupportedModelError, match=message):
        clip_inputs(model, input_norm=1.0)
    assert type(model[0]) is nn.Linear and type(model[2]) is nn.Linear  # as it was


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(1, 2, 3),
    "embedding": lambda: nn.Embedding(4, 3),
    "layer norm": lambda: nn.LayerNorm(3),
    "group norm": lambda: nn.GroupNorm(1, 3),
    "lstm": lambda: nn.LSTM(3, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_hooks_are_refused_in_every_kind_of_layer(kind: str) -> None:
    layer = LAYERS[kind]()
    layer.register_forward_hook(lambda m, given, out: None)
    with pytest.raises(UnsupportedModelError, match=r"Layer 'model' .* has hooks"):
        clip_inputs(layer, input_norm=1.0)


def test_hooks_of_other_modules_are_still_called() -> None:
    """Containers, and layers that are not trained."""
    model = network()
    model[0].requires_grad_(False)
    for module in (model, model[0], model[1]):
        module.register_forward_hook(lambda m, given, out: 2 * out)
    x = torch.randn(4, FEATURES)
    expected = model(x)
    torch.testing.assert_close(clip_inputs(model, input_norm=1e6)(x), expected)


def test_hooks_may_be_put_on_the_clipped_layer() -> None:
    model = network()
    by_hand = copy.deepcopy(model)
    clip_inputs(model, input_norm=1e6)
    model[0].register_forward_hook(lambda m, given, out: 3 * out)
    x = torch.randn(4, FEATURES)
    expected = by_hand[2](by_hand[1](3 * by_hand[0](x)))
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected)
    train(*private_run(model.train(), clipping=Backprop()), steps=1)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Doubled(5, 3), r"'1\.weight' belongs to a Doubled"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), r"'1\.bias' belongs to a ParametrizedLinear"),
    ],
    ids=["subclass", "parametrization"],
)
def test_other_classes_are_refused_by_the_name_of_a_parameter(layer: nn.Module, what: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), layer)
    with pytest.raises(UnsupportedModelError, match=what):
        clip_inputs(model, input_norm=1.0)
    assert type(model[0]) is nn.Linear


def test_a_clipped_model_can_be_pickled_and_not_scripted() -> None:
    """As documented in docs/guides/backprop.md; update that page if scripting works."""
    model = clip_inputs(network(), input_norm=1.0)
    x = torch.randn(4, FEATURES)
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again[0], ClippedLayer) and torch.equal(again(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated in torch
        with pytest.raises(Exception, match=r"nn\.Linear"):
            torch.jit.script(model)
