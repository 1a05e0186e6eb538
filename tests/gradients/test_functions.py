"""Custom autograd.Functions of all styles, against a separate forward pass for each example in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise.errors import UnsupportedModelError
from clipwise.gradients import METHODS, Memory, Written, per_example_gradients, register
from clipwise.gradients.rules import registry
from tests.gradients.cases import losses, oracle, trainable

pytestmark = pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
D, BATCH = 4, 8


class Power(torch.autograd.Function):
    """A number precedes the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.power = power
        return (x * w) ** power

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        d = g * ctx.power * (x * w) ** (ctx.power - 1)
        return d * w, None, (d * x).sum(0)


class Adjoint(torch.autograd.Function):
    """Like an ODE solver's: a function and options, then any number of parameters, some of them frozen."""

    @staticmethod
    def forward(ctx: Any, shapes: object, y0: Tensor, t: Tensor, tol: float, options: object, *params: Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y0, t, *params)
        a, b, c = params
        return torch.stack([y0, y0 + t[1] * (y0 * a + b) * c])  # [T, B, D]: time first

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[no-untyped-def, override]
        y0, t, a, b, c = ctx.saved_tensors
        end = g[1] * t[1]
        grad_a, grad_b, grad_c = (end * y0 * c).sum(0), (end * c).sum(0), (end * (y0 * a + b)).sum(0)
        return None, g.sum(0) + end * a * c, None, None, None, grad_a, grad_b, grad_c


class SeveralOutputs(torch.autograd.Function):
    """Written with setup_context; a dictionary argument, and an output without a gradient."""

    @staticmethod
    def forward(x: Tensor, options: dict[str, float], v: Tensor, w: Tensor):  # type: ignore[no-untyped-def]
        return x * v * options["scale"], x > 0, (x @ w).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, options, v, w = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.scale = options["scale"]
        ctx.save_for_backward(x, v, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None, h: Tensor | None):  # type: ignore[no-untyped-def, override]
        x, v, w = ctx.saved_tensors
        g = torch.zeros_like(x) if g is None else g * ctx.scale
        d = torch.zeros_like(x @ w) if h is None else 2 * h * (x @ w)
        return g * v + d @ w.T, None, (g * x).sum(0), (d.T @ x).T  # not contiguous


class Broadcast(torch.autograd.Function):
    """Relies on autograd to reduce broadcast gradients, and returns more gradients than arguments."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, times: int, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        ctx.times = times
        return times * w * x

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # type: ignore[no-untyped-def, override]
        w, x = ctx.saved_tensors
        return ctx.times * g * x, None, (ctx.times * g * w).sum(1, keepdim=True), None


class Branching(nn.Module):
    """A function that only examples with a large first number use."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.first = name, nn.Linear(D, D)
        self.v, self.w, self.c = (nn.Parameter(torch.randn(D)) for _ in range(3))
        self.matrix = nn.Parameter(torch.randn(D, 3))
        used = {"power": "w", "adjoint": "vw", "outputs": "v", "second output": "", "broadcast": "w"}[name]
        for p, letter in ((self.v, "v"), (self.w, "w"), (self.c, "c")):
            p.requires_grad_(letter in used)
        self.matrix.requires_grad_("output" in name)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        taken_B1 = (x[:, :1] > 1).to(x)
        return (1 - taken_B1) * h + taken_B1 * self.function(h)

    def function(self, h: Tensor) -> Tensor:
        if self.name == "power":
            return Power.apply(h, 3, self.w)
        if self.name == "adjoint":
            t = torch.tensor([0.0, 0.7], dtype=h.dtype)
            return Adjoint.apply((D,), h, t, 1e-3, {"method": "euler"}, self.v, self.w, self.c)[-1]
        if self.name == "broadcast":
            return Broadcast.apply(self.w, 2, h[:, :1])
        first, positive, second = SeveralOutputs.apply(h, {"scale": 0.5}, self.v, self.matrix)
        both = second.sum(1, keepdim=True)
        return both.expand(-1, D) if self.name == "second output" else first * positive + both


FUNCTIONS = ("power", "adjoint", "outputs", "second output", "broadcast")


def rows(taken: int, seed: int) -> tuple[Tensor]:
    """A batch in which a given number of examples take the branch."""
    x = torch.randn(BATCH, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).clamp(max=0.9)
    x[2 : 2 + taken, 0] = 1.5
    return (x,)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_exact_however_few_examples_use_it(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, memory = Branching(name).double(), Memory()
    w_B = torch.linspace(0.5, 2, BATCH, dtype=torch.float64)
    for seed, taken in enumerate((1, 0, 0, 3, 1)):
        inputs = rows(taken, seed)
        truth = oracle(model, inputs)
        found = per_example_gradients(losses(model, inputs), trainable(model), memory, method)
        squares = found.squared_norms()
        sums = found.weighted_sums(dict.fromkeys(truth, w_B))
        for parameter, g in truth.items():
            torch.testing.assert_close(squares[parameter], g.flatten(1).square().sum(1))
            torch.testing.assert_close(sums[parameter], torch.tensordot(w_B, g, 1))
            assert bool(g.any()) == (parameter.startswith("first") or taken > 0)


# Wrong rules. The comparison with plain autograd detects them at any position of the gradient.


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w**3, (3 * g * x * w**2).sum(0)


class Cubes(nn.Module):
    """The same function twice: in a branch, and before it if `both`."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(D, D), nn.Parameter(torch.randn(D))
        self.v = nn.Parameter(torch.randn(D)) if both else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.v is not None:
            h = h + self.v * h
        taken_B1 = (x[:, :1] > 1).to(x)
        return (1 - taken_B1) * h + taken_B1 * Cube.apply(h, self.w)


def mistaken(factor: float) -> Callable[..., Any]:
    def rule(node: Any, shapes: Any) -> Any:
        x, w = node.saved_tensors
        return lambda g, layout: {1: Written.of(factor * layout.rows(3 * g * x * w**2).sum(1))}

    return rule


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    return lambda factor: register("CubeBackward")(mistaken(factor)) and None


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("factor", [0.0, 2.0])
@pytest.mark.parametrize("method", ["auto", "bookkeeping", "reweight", "instantiate"])
def test_a_wrong_rule_is_detected_at_the_first_example_with_a_gradient(
    rule: Callable[[float], None], method: str, factor: float, both: bool
) -> None:
    rule(factor)
    torch.manual_seed(0)
    model, memory = Cubes(both).double(), Memory()

    def step(taken: int, seed: int) -> None:
        found = per_example_gradients(losses(model, rows(taken, seed)), trainable(model), memory, method)
        found.squared_norms()
        found.weighted_sums(dict.fromkeys(trainable(model), torch.ones(BATCH, dtype=torch.float64)))

    for seed in range(6):  # the branch is never taken: any rule is right
        step(0, seed)
    with pytest.raises(UnsupportedModelError, match="'w' does not agree with plain autograd"):
        step(1, 6)


def test_a_right_rule_is_compared_twice_and_then_trusted(
    rule: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clipwise.gradients import selfcheck

    compared: list[int] = []
    single = selfcheck.single

    def counted(*args: Any, **options: Any) -> Any:
        compared.append(args[1])
        return single(*args, **options)

    monkeypatch.setattr(selfcheck, "single", counted)
    rule(1.0)
    torch.manual_seed(0)
    model, memory = Cubes(False).double(), Memory()
    passes = []
    for seed, taken in enumerate((0, 0, 0, 0, 1, 0, 1, 1, 2)):
        per_example_gradients(losses(model, rows(taken, seed)), trainable(model), memory, "reweight").squared_norms()
        passes.append(len(compared))
        compared.clear()
    assert passes == [2, 2, 0, 0, 2, 0, 2, 0, 0]  # two backward passes for each compared example


def test_a_gradient_of_rounding_alone_is_not_compared_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the bias of attention's keys is pure rounding error."""
    from clipwise.gradients import selfcheck

    torch.manual_seed(0)
    model = nn.ModuleDict({"key": nn.Linear(6, 6), "query": nn.Linear(6, 6)})

    def forward(x: Tensor) -> Tensor:
        scores = model["query"](x) @ model["key"](x).mT
        return (scores.softmax(-1) @ x).flatten(1).square().sum(1)

    parameters = trainable(model)
    memory, compared = Memory(), []
    examined = selfcheck.examined
    monkeypatch.setattr(selfcheck, "examined", lambda *a: compared.append(a[2]) or examined(*a))
    for _ in range(5):
        before = len(compared)
        per_example_gradients(forward(torch.randn(BATCH, 3, 6)), parameters, memory).squared_norms()
    assert len(compared) == before <= 6
