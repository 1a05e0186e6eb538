"""Forward passes whose graph is incomplete are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.errors import UnsupportedModelError
from clipwise.layers import ClipInput
from clipwise.lipschitz import bounds_of, trace
from clipwise.lipschitz.forward_graph import graph_of, steps_of


class By(nn.Module):
    """A forward pass after the clip, given as a function."""

    def __init__(self, forward: Callable[[By, Tensor], Tensor]) -> None:
        super().__init__()
        self.clip, self.a, self.b = ClipInput(1.0), nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = 0
        self.how = (forward,)

    def forward(self, x: Tensor) -> Tensor:
        return self.how[0](self, self.clip(x))


def _writes_data(m: By, x: Tensor) -> Tensor:
    x.data.mul_(1000.0)
    return m.a(x)  # type: ignore[no-any-return]


def _writes_in_place(m: By, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1000.0)
    return m.a(x)  # type: ignore[no-any-return]


def _writes_through_an_activation(m: By, x: Tensor) -> Tensor:
    with torch.no_grad():
        F.elu(x, inplace=True)
    return m.a(x)  # type: ignore[no-any-return]


def _drops_in_place(m: By, x: Tensor) -> Tensor:
    y = m.a(x)
    return F.dropout(y, 0.5, True, True) + y  # type: ignore[no-any-return]


def _counts(m: By, x: Tensor) -> Tensor:
    m.calls += 1
    return m.a(x + m.calls)  # type: ignore[no-any-return]


HIDDEN: dict[str, tuple[Callable[[By, Tensor], Tensor], str]] = {
    "data": (_writes_data, r"\.data are not in the graph"),
    "in place": (_writes_in_place, "in place: use mul"),
    "in place by an operator": (lambda m, x: m.a(x.__imul__(2.0)), "in place: write it with an operator"),
    "an activation in place": (_writes_through_an_activation, "in place a value with other uses"),
    "dropout in place, by position": (_drops_in_place, "in place a value with other uses"),
    "a random tensor": (lambda m, x: m.a(x + 5 * torch.randn(4)), r"makes a tensor .*\(register_buffer\)"),
    "a new tensor": (lambda m, x: m.a(x * torch.tensor(2.0)), "makes a tensor"),
    "a random number": (lambda m, x: m.a(x + random.random()), "not the same each time"),
    "a count": (_counts, "not the same each time"),
    "all pairs": (lambda m, x: m.b((m.a(x).unsqueeze(1) + x).mean(1)), "second dimension"),
    "all pairs of sums": (lambda m, x: m.b(m.a(x) * (x.sum(1) - x.sum(1, keepdim=True)).mean(1)), "second"),
    "a product with weights": (lambda m, x: x @ m.a.weight, "use nn.Linear"),
    "a linear function": (lambda m, x: F.linear(x, m.b.weight), "use nn.Linear"),
    "dot products": (lambda m, x: (x.unsqueeze(2) @ x.unsqueeze(1)).sum(1), "another strategy"),
    "a clamp": (lambda m, x: m.a(x.clamp(0, 1)), "nn.Hardtanh"),
    "the number of examples": (lambda m, x: m.a(x + 1000.0 / x.shape[0]), "number of examples, which is secret"),
    "a slice of as many": (
        lambda m, x: m.a(x + x[:, : x.shape[0]].sum(1, keepdim=True)),
        "number of examples, which is secret",
    ),
    "whether their number is odd": (
        lambda m, x: m.a(x + 9.0 * (x.shape[0] % 2)),
        "number of examples, which is secret",
    ),
    "a mean over examples": (lambda m, x: m.a(x * (1 / x.size(0))), "number of examples, which is secret"),
    "an old alpha": (lambda m, x: m.a(torch.add(x, 2, x)), "alpha"),
    "examples moved on": (lambda m, x: m.a(F.pad(x, (0, 0, 1, -1))), "pads the dimension that holds the examples"),
    "no dimension": (lambda m, x: m.a(x.squeeze()), "a batch of one example.*give dim"),
    "that of examples": (lambda m, x: m.a(x.squeeze(0)), "dimension 0, which holds the examples"),
    "half precision": (lambda m, x: m.a(x + x.mean(1, dtype=torch.half).unsqueeze(1)), "returns torch.float16"),
    "a clipped input in place": (lambda m, x: m.a(F.relu(x, inplace=True)), "the output of ClipInput"),
    "pieces": (lambda m, x: m.a(torch.cat(x.split(2, 1), 1)), "use slices"),
    "a stack": (lambda m, x: m.a(torch.stack([x, x], 1)), "torch.cat"),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_operations_outside_the_graph_are_refused(what: str) -> None:
    forward, message = HIDDEN[what]
    with pytest.raises(UnsupportedModelError, match=message):
        trace(By(forward), (4,))


@pytest.mark.parametrize(
    "sized",
    [
        lambda x: x.view(x.shape[0], -1),
        lambda x: x.reshape(x.size(0), 2, 2).view(x.shape),
        lambda x: torch.reshape(x, (x.size()[0], 4)),
        lambda x: x / x.shape[1],
    ],
)
def test_the_number_of_examples_may_be_a_size(sized: Callable[[Tensor], Tensor]) -> None:
    assert bounds_of(trace(By(lambda m, x: m.b(sized(m.a(x)))), (4,)), 1.0).sensitivities


class SizedByItsInput(By):
    """Reads the shape of its unclipped input."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(self.how[0](x, self.clip(x))))  # type: ignore[arg-type]
        return y


@pytest.mark.parametrize(
    "sized",
    [
        lambda raw, x: x.view(raw.shape[0], -1),
        lambda raw, x: x.reshape(raw.size(0), 2, 2).flatten(raw.dim() - 1),
        lambda raw, x: x / raw.shape[1],
    ],
)
def test_the_shape_of_the_input_may_be_read(sized: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = SizedByItsInput(sized)  # type: ignore[arg-type]
    assert bounds_of(trace(model, (4,)), 1.0).sensitivities["b.weight"] > 0


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda raw, x: x * (1000.0 / raw.shape[0]), "number of examples, which is secret"),
        (lambda raw, x: x + raw.mean(1, keepdim=True), "Begin the model with"),
        (lambda raw, x: x + raw.T.shape[0], "Begin the model with"),
    ],
)
def test_nothing_else_of_the_input_may_be_read(forward: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        trace(SizedByItsInput(forward), (4,))  # type: ignore[arg-type]


def test_unused_operations_cost_nothing() -> None:
    def with_unused(m: By, x: Tensor) -> Tensor:
        m.a(x)
        return m.b(x)  # type: ignore[no-any-return]

    found = trace(By(with_unused), (4,))
    assert bounds_of(found, 1.0).sensitivities.keys() == {"b.weight", "b.bias"}


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = By(_counts)
    with pytest.raises(UnsupportedModelError):
        graph_of(model)
    assert model.calls == 0 and not [name for name in vars(model) if name.startswith("_tensor_constant")]


def test_graphs_are_compared_by_their_operations() -> None:
    one, other = (steps_of(graph_of(By(lambda m, x, n=n: m.a(x + n)))) for n in (1.0, 2.0))  # type: ignore[misc]
    assert one != other and one == steps_of(graph_of(By(lambda m, x: m.a(x + 1.0))))


POOLS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
    "max": (lambda x: F.max_pool2d(x, 3, 1), nn.MaxPool2d(3, 1)),
    "max by name": (lambda x: F.max_pool2d(x, kernel_size=2, padding=1), nn.MaxPool2d(2, padding=1)),
    "average": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, 3), nn.AdaptiveMaxPool2d(3)),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), nn.AdaptiveAvgPool2d((2, 3))),
    "padding": (lambda x: F.pad(x, (1, 2)), nn.ZeroPad2d((1, 2, 0, 0))),
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_function_has_the_bound_of_its_module(kind: str) -> None:
    function, module = POOLS[kind]

    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    shape = (1, 5, 5)
    size = module(torch.zeros(1, *shape)).numel()
    last = nn.Linear(size, 2)
    found = [
        bounds_of(trace(nn.Sequential(ClipInput(1.0), pool, nn.Flatten(), last), shape), 1.0).sensitivities
        for pool in (Called(), module)
    ]
    assert found[0] == found[1]


SETTINGS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
    "leaky_relu": (F.leaky_relu, nn.LeakyReLU()),
    "leaky_relu, steeper": (lambda x: F.leaky_relu(x, 3.0), nn.LeakyReLU(3.0)),
    "elu": (lambda x: F.elu(input=x, alpha=2.0), nn.ELU(2.0)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), nn.GELU("tanh")),
    "softplus": (lambda x: F.softplus(x, 2.0), nn.Softplus(2.0)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.1, 0.2), nn.Hardtanh(-0.1, 0.2)),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_activation_has_the_bound_of_its_module_whatever_its_settings(kind: str) -> None:
    function, module = SETTINGS[kind]
    last = nn.Linear(4, 2)

    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    found = [
        bounds_of(trace(nn.Sequential(ClipInput(1.0), f, last), (4,)), 1.0).sensitivities for f in (Called(), module)
    ]
    assert found[0] == found[1]


def test_a_module_does_not_pad_the_examples() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'1' .*pads the dimension that holds the examples"):
        trace(nn.Sequential(ClipInput(1.0), nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(3, 2)), (3,))


def test_models_that_cannot_be_traced_are_refused_with_a_remedy() -> None:
    model = nn.Sequential(ClipInput(1.0), nn.Linear(3, 2))
    with pytest.raises(UnsupportedModelError, match=r"without torch\.compile"):
        trace(torch.compile(model, backend="eager"), (3,))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"'1' \(LazyLinear\).*run the model once"):
        trace(nn.Sequential(ClipInput(1.0), nn.LazyLinear(2)), (3,))


ROWS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "max": (nn.MaxPool2d(3, 1), (5, 5), "no channel dimension"),
    "average": (nn.AvgPool2d(3, 1), (5, 5), "no channel dimension"),
    "adaptive": (nn.AdaptiveAvgPool2d(2), (5, 5), "no channel dimension"),
    "line": (nn.MaxPool1d(3, 1), (5,), "no channel dimension"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_examples_are_not_taken_for_channels_or_time(kind: str) -> None:
    layer, shape, message = ROWS[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        trace(nn.Sequential(ClipInput(1.0), layer), shape)


@pytest.mark.parametrize(
    "layer", [nn.Softplus(beta=0.0), nn.Softplus(threshold=500.0), nn.ELU(float("nan")), nn.LeakyReLU(float("inf"))]
)
def test_settings_without_a_slope_are_refused(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'1' \({type(layer).__name__}\)"):
        trace(nn.Sequential(ClipInput(1.0), layer, nn.Linear(3, 2)), (3,))
