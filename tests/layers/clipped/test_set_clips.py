"""Changed constants act as if set from the beginning, and private runs follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import Backprop, layers
from clipwise.errors import ConfigurationError, StepError
from clipwise.layers import ClippedLayer
from clipwise.privacy import effective_multiplier
from tests.layers.clipped.cases import CASES, Case, bounds, clipped, inputs
from tests.runs import data, losses_of, network, parameters, private_run, same, train

every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
MORE = {"input_norm": 0.6, "grad_norm": 3.0}


def gradients(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Of losses steep enough for every clip to act."""
    losses = 50 * model(inputs(case, scale=3.0)).flatten(1).sin().sum(1)
    found = torch.autograd.grad(losses.sum(), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


@every_case
def test_a_changed_layer_equals_a_new_one(case: Case) -> None:
    model, expected = clipped(case), clipped(case, **MORE)
    before = gradients(model, case)
    layers.set_clips(model, **MORE)
    assert bounds(model) == bounds(expected)
    found = gradients(model, case)
    assert same(found, gradients(expected, case)) and not same(found, before)
    with torch.no_grad():
        assert torch.equal(model(inputs(case)), expected(inputs(case)))
    assert bounds(copy.deepcopy(model)) == bounds(expected)


def test_a_mapping_names_the_layers_that_change() -> None:
    model = layers.clip_inputs(network(), input_norm=2.0, grad_norm=0.5)
    layers.set_clips(model, grad_norm={"2": 0.1})
    first, last = (m for m in model.modules() if isinstance(m, ClippedLayer))
    assert (first.constants.grad_norm, last.constants.grad_norm) == (0.5, 0.1)
    assert (first.constants.input_norm, last.constants.input_norm) == (2.0, 2.0)


def test_one_number_is_for_all_layers_also_where_parts_were_clipped_separately() -> None:
    model = nn.Sequential(*(layers.clip_inputs(network(), input_norm=2.0) for _ in range(2)))
    layers.set_clips(model, grad_norm=0.3)
    assert {m.constants.grad_norm for m in model.modules() if isinstance(m, ClippedLayer)} == {0.3}


def test_invalid_constants_are_refused_and_change_nothing() -> None:
    model = layers.clip_inputs(network(), input_norm=2.0, grad_norm=0.5)
    before = bounds(model)
    for options, match in (
        ({}, "nothing to set"),
        ({"grad_norm": -1.0}, "grad_norm"),
        ({"input_norm": {"0": 1.0, "7": 1.0}}, "no clipped layer '7', only '0', '2'"),
        ({"input_norm": 1.0, "grad_norm": {"2": float("nan")}}, "grad_norm"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            layers.set_clips(model, **options)
    with pytest.raises(ConfigurationError, match="call clip_inputs"):
        layers.set_clips(network(), grad_norm=1.0)
    assert bounds(model) == before


def run(**options: Any) -> tuple[nn.Module, Any]:
    model = layers.clip_inputs(network(torch.float64), input_norm=2.0, grad_norm=0.5)
    return private_run(model, dataset=data(dtype=torch.float64), **{"clipping": Backprop(), "epochs": 9, **options})


def test_the_noise_follows_from_the_next_batch_on() -> None:
    model, private = run()
    train(model, private, 2)
    before = {p.name: (p.sensitivity, p.noise_std) for p in private.parts()}
    layers.set_clips(model, input_norm=4.0, grad_norm={"0": 0.05})
    train(model, private, 1)
    after = {p.name: (p.sensitivity, p.noise_std) for p in private.parts()}
    factors = {"0.layer.weight": 0.2, "0.layer.bias": 0.1, "2.layer.weight": 2.0, "2.layer.bias": 1.0}
    for name, factor in factors.items():
        assert after[name][0] == pytest.approx(factor * before[name][0])
        assert after[name][1] != before[name][1]
    assert effective_multiplier(private.parts()) == pytest.approx(1.0)


def test_the_ledger_records_every_change_once() -> None:
    model, private = run()
    train(model, private, 3)
    layers.set_clips(model, grad_norm=0.05)
    train(model, private, 3)
    sensitivities = [about["parts"][1]["sensitivity"] for about in private._context.ledger.about]
    assert sensitivities == [0.5, 0.05]


def test_an_epsilon_does_not_depend_on_constants() -> None:
    spent = []
    for changes in (False, True):
        model, private = run()
        train(model, private, 2)
        if changes:
            layers.set_clips(model, grad_norm=0.01)
        train(model, private, 2)
        spent.append(private.spent(1e-5).epsilon)
    assert spent[0] == spent[1]


def test_a_batch_drawn_before_the_change_is_refused() -> None:
    model, private = run()
    batch = next(iter(private.loader))
    layers.set_clips(model, grad_norm=5.0)
    with pytest.raises(StepError, match="constants of layer '0' changed between the draw of a batch"):
        private.step(losses_of(model, batch))
    assert private.steps == 0
    train(model, private, 1)  # the next batch has the new noise


def test_pieces_of_one_batch_have_the_same_constants() -> None:
    model, private = run(sampling="full", max_physical_batch_size=9)
    pieces = iter(private.loader.pieces())
    assert not private.step(losses_of(model, next(pieces)))
    layers.set_clips(model, grad_norm=0.001)
    with pytest.raises(StepError, match="between two pieces of a batch"):
        private.step(losses_of(model, next(pieces)))
    assert private.steps == 0
    train(model, private, 1)
    assert private.steps == 1


def test_a_checkpoint_restores_its_constants() -> None:
    model, private = run()
    train(model, private, 2)
    layers.set_clips(model, input_norm=1.0, grad_norm={"2": 0.2})
    train(model, private, 1)
    weights, state = copy.deepcopy(model.state_dict()), private.state_dict()
    parts = private.parts()
    other, again = run()
    other.load_state_dict(weights)
    with pytest.warns(Warning, match="fresh secret"):
        again.load_state_dict(state)
    assert again.parts() == parts and bounds(other) == bounds(model)
    assert same(parameters(other), parameters(model))


def test_parts_show_new_clips_at_once_but_not_while_a_batch_is_due() -> None:
    model = layers.clip_inputs(network(), input_norm=2.0, grad_norm=0.5)
    _, private = private_run(model, clipping=Backprop())

    def sensitivities() -> list[float]:
        return [part.sensitivity for part in private.parts()]

    assert sensitivities() == [1.0, 0.5, 1.0, 0.5]
    layers.set_clips(model, grad_norm=0.25)
    assert sensitivities() == [0.5, 0.25, 0.5, 0.25]
    batch = next(iter(private.loader))
    layers.set_clips(model, grad_norm=0.125)
    assert sensitivities() == [0.5, 0.25, 0.5, 0.25]
    with pytest.raises(StepError, match="changed between the draw"):
        private.step(losses_of(model, batch))
