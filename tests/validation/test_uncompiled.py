"""A model that the user compiled trains as the model inside it, and stays compiled for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clipwise
from clipwise import Private
from tests.runs import data, losses_of, network, parameters, private_run, same, sgd, train

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Own(nn.Sequential):
    """With a forward pass of its own: `compile()` has no effect on torch's own containers."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](torch.tanh(self[0](x)))


def whole() -> nn.Module:
    return torch.compile(network(), backend=BACKEND)  # type: ignore[return-value]


def in_place() -> nn.Module:
    model = Own(*network())
    model.compile(backend=BACKEND)
    return model


def inner() -> nn.Module:
    model = network()
    model[0] = torch.compile(model[0], backend=BACKEND)  # type: ignore[assignment]
    return model


def layer_in_place() -> nn.Module:
    model = network()
    model[2].compile(backend=BACKEND)
    return model


COMPILED = {"whole": whole, "in place": in_place, "a layer": inner, "a layer in place": layer_in_place}


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled_step", [False, True])
@pytest.mark.parametrize("kind", COMPILED)
def test_it_trains_like_the_model_inside(kind: str, is_compiled_step: bool) -> None:
    expected = network()
    train(*private_run(expected, seed=1), 7)
    model = COMPILED[kind]()
    with torch.no_grad():
        model(data().tensors[0])  # compiles before the run begins
    _, private = private_run(model, sgd(model), seed=1)
    if is_compiled_step:
        step = private.compiled(lambda x, y: losses_of(model, (x, y)), backend="aot_eager")
        batches = iter(private.loader)
        made = 0
        while made < 7:
            batch = next(batches, None)
            if batch is None:
                batches = iter(private.loader)
                continue
            made += step(*batch)
        assert step._traced is not None
    else:
        train(model, private, 7)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_names_are_those_of_the_model_inside() -> None:
    model = whole()
    _, private = private_run(model, sgd(model))
    assert list(private._context.parameters) == list(dict(network().named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "in place"])
def test_evaluation_stays_compiled(kind: str) -> None:
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        calls.append(1)
        return graph.forward

    model: nn.Module = Own(*network())
    if kind == "whole":
        model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    else:
        model.compile(backend=backend)
    private: Private = private_run(model, sgd(model))[1]
    train(model, private, 2)
    assert not calls
    with torch.no_grad():
        found = model(data().tensors[0])
    assert calls
    reference = network()
    reference.load_state_dict(getattr(model, "_orig_mod", model).state_dict())
    torch.testing.assert_close(found, reference(data().tensors[0]))


def test_check_accepts_it() -> None:
    model = whole()
    report = clipwise.check(model, lambda m, x, y: losses_of(m, (x, y)), data(8).tensors)
    assert report.ok, report


def test_a_second_run_keeps_it_working() -> None:
    model = whole()
    for _ in range(2):
        private = private_run(model, sgd(model))[1]
        train(model, private, 2)
        private.close()
    before = parameters(model)
    assert same(before, parameters(model))


@pytest.mark.slow
def test_a_loss_with_a_compiled_function_runs_in_a_compiled_step() -> None:
    model = network()
    own = torch.compile(model, backend=BACKEND)
    _, private = private_run(model, sgd(model))
    step = private.compiled(lambda x, y: losses_of(own, (x, y)))  # type: ignore[arg-type]
    assert step(*next(iter(private.loader)))
