"""Outputs of another graph than the traced one are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from clipwise.layers.bounded import ClipInput
from clipwise.lipschitz import GraphMatch, trace
from clipwise.lipschitz.traced_model_check import _settings
from tests.lipschitz.networks import FAMILIES, draw


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ClipInput(1.0),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


X = torch.randn(5, 1, 6, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_the_traced_model_are_accepted_for_every_batch_size(family: str) -> None:
    for seed in range(15):
        model, shape = draw(family, seed)
        match = GraphMatch(trace(model, shape))
        for size in (1, 2, 3, 8):
            x = torch.randint(0, 3, (size, *shape)) if family == "table" else torch.randn(size, *shape)
            match.require(model(x))
            model.eval()
            match.require(model(x))
            model.train()


def _autocast(model: nn.Sequential) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(X)  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[nn.Sequential], Tensor]] = {
    "a factor at the end": lambda m: 2 * m(X),
    "an input that is not clipped": lambda m: m[1:](X),
    "another clip": lambda m: nn.Sequential(ClipInput(2.0), *m[1:])(X),
    "a layer left out": lambda m: nn.Sequential(*m[:2], *m[3:])(X),
    "another slope": lambda m: nn.Sequential(*m[:2], nn.LeakyReLU(0.5), *m[3:])(X),
    "another layer's weights": lambda m: nn.Sequential(*m[:5], nn.Linear(144, 3))(X),
    "an input of its own": lambda m: m(X) + X.flatten(1)[:, :3],
    "autocast": _autocast,
    "a larger image": lambda m: nn.Sequential(*m[:4], nn.AvgPool2d(2), *m[4:])(torch.randn(5, 1, 12, 12)),
    "a shape of its own": lambda m: m(X)[:, :2],
    "nothing to go back to": lambda m: m(X).detach(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_outputs_are_refused(what: str) -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    match.require(model(X))
    with pytest.raises(UnsupportedModelError, match="outputs: "):
        match.require(OTHERS[what](model))


def test_autocast_around_the_whole_step_is_refused_too() -> None:
    """The reference graph must not be recorded under autocast."""
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedModelError, match="autocast"):
        match.require(model(X))
    match.require(model(X))


def test_numbers_in_the_code_are_compared_too() -> None:
    class Scaled(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.clip, self.linear = ClipInput(1.0), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.clip(x)) * self.factor

    model = Scaled()
    match = GraphMatch(trace(model, (3,)))
    match.require(model(torch.randn(4, 3)))
    model.factor = 50.0
    with pytest.raises(UnsupportedModelError, match=r"50\.0.*2\.0"):
        match.require(model(torch.randn(4, 3)))


def test_the_check_draws_no_random_numbers_and_changes_no_gradients() -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    outputs = model(X)
    before = torch.random.get_rng_state()
    match.require(outputs)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_outputs_from_before_a_change_of_the_weights_are_refused() -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    outputs = model(X)
    with torch.no_grad():
        model[5].weight.mul_(2)
    with pytest.raises(UnsupportedModelError, match="Run the model again"):
        match.require(outputs)


class Twice(nn.Module):
    """Clips its input, and the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.again = ClipInput(1.0), ClipInput(1.0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.first: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.clip(x) if self.first is None else self.first * x
        return self.b(self.again(self.a(x)))  # type: ignore[no-any-return]


def test_operations_before_a_second_clip_are_compared_too() -> None:
    model = Twice()
    match = GraphMatch(trace(model, (3,)))
    x = torch.randn(4, 3)
    match.require(model(x))
    match.require(model((2 * x.requires_grad_()).exp()))  # operations on an input before its clip do not matter
    with pytest.raises(UnsupportedModelError, match="outputs: "):
        match.require(model(model.a(x)))  # a use before the clip has a gradient too
    model.first = 50.0
    with pytest.raises(UnsupportedModelError, match="outputs: "):
        match.require(model(x))


def test_inputs_of_another_size_are_refused_although_pooling_takes_them() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    match = GraphMatch(trace(model, (1, 32, 32)))
    match.require(model(torch.randn(64, 1, 32, 32)))
    for size in (1, 16, 64):
        with pytest.raises(UnsupportedModelError, match=r"shape=\(1, 32, 32\)"):
            match.require(model(torch.randn(64, 1, size, size)))


def test_longer_texts_are_refused_also_where_they_are_as_long_as_the_batch() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    model = nn.Sequential(nn.Embedding(5, 3), Mean(), nn.Linear(3, 2))
    match = GraphMatch(trace(model, (2,)))
    match.require(model(torch.randint(0, 5, (8, 2))))
    for length in (1, 8):  # with 8 examples all is 4 times as large as with 2
        with pytest.raises(UnsupportedModelError, match="outputs: "):
            match.require(model(torch.randint(0, 5, (8, length))))


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_sizes_grow_with_the_examples(family: str) -> None:
    for seed in range(6):
        model, shape = draw(family, seed)
        match = GraphMatch(trace(model, shape))
        for size in (2, 8, 3):
            x = torch.randint(0, 3, (size, *shape)) if family == "table" else torch.randn(size, *shape)
            outputs = model(x)
            assert outputs.grad_fn is not None
            found = list(match._spots(outputs.grad_fn))
            assert match._of_the_trace(x.device, size) == found
            assert match._of_the_trace(x.device, size + 1) != found


def test_a_parameter_in_another_place_is_refused() -> None:
    """Operations, connections and shapes are the same."""
    model = nn.Sequential(ClipInput(1.0), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    match = GraphMatch(trace(model, (4,)))
    x = torch.randn(3, 4)
    match.require(model(x))
    for others in ((1, 2, 1), (3, 2, 3), (3, 2, 1)):
        outputs = model[0](x)
        for place in others:
            outputs = model[place](outputs)
        with pytest.raises(UnsupportedModelError, match="outputs: operation"):
            match.require(outputs)


def test_swapped_branches_are_refused() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip, self.a, self.b = ClipInput(1.0), nn.Linear(3, 3), nn.Linear(3, 3)
            self.crosses = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.clip(x)
            one, other = self.a(x).tanh(), self.b(x).sigmoid()
            return one + (one if self.crosses else other) + other

    model = Crossing()
    match = GraphMatch(trace(model, (3,)))
    x = torch.randn(3, 3)
    match.require(model(x))
    model.crosses = True
    with pytest.raises(UnsupportedModelError, match="outputs: operation"):
        match.require(model(x))


def test_a_used_up_graph_is_refused() -> None:
    model = net()
    match = GraphMatch(trace(model, (1, 6, 6)))
    outputs = model(X)
    outputs.sum().backward()
    with pytest.raises(UnsupportedModelError, match="used up"):
        match.require(outputs)


def test_only_numbers_and_strings_are_settings() -> None:
    class Kept:
        _saved_flag, _saved_word, _saved_list, _saved_number = True, "zeros", [1, 2], torch.tensor(2.0)
        _saved_none, _saved_tensor, _saved_some, _saved_object = None, torch.ones(1), [None], object()
        _saved_trained = torch.tensor(2.0, requires_grad=True)
        _saved_parameter = nn.Parameter(torch.tensor(1.0), False)
        _saved_self_sizes = (3,)

    plain = {"_saved_flag": True, "_saved_word": "zeros", "_saved_list": (1, 2), "_saved_number": 2.0}
    assert dict(_settings(Kept())) == plain
