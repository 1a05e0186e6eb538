"""Backpropagation clipping: what is accepted, what is refused and how, what is stated, what stays for export."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipwise
from clipwise import Backprop, PerExample, layers
from clipwise.accounting import zcdp
from clipwise.audit.trial import run_of
from clipwise.errors import ConfigurationError, CoupledExamplesError, StepError, UnsupportedModelError
from clipwise.gradients.precision import TF32
from clipwise.layers.clipped import unclipped
from clipwise.privacy import Adjacency
from tests.layers.clipped.cases import CASES, inputs
from tests.layers.clipped.cases import clipped as clipped_case
from tests.runs import data, losses_of, network, private_run, train
from tests.sites import site


def clipped(model: nn.Module | None = None, **options: Any) -> nn.Module:
    options = {"input_norm": 2.0, "grad_norm": 0.5, **options}
    return layers.clip_inputs(network() if model is None else model, **options)


# ------------------------------------------------------------------ clip_inputs


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e-20, True, "1", None], ids=repr)
@pytest.mark.parametrize("argument", ["input_norm", "grad_norm"])
def test_constants_must_be_positive_numbers(argument: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=argument):
        clipped(**{argument: value})


def test_other_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="mode='scale' is not known"):
        clipped(mode="scale")
    with pytest.raises(ConfigurationError, match="bound='exact' is not known"):
        clipped(bound="exact")
    for argument in ("mode", "bound"):  # an array is equal to a word in no one way
        with pytest.raises(ConfigurationError, match=argument):
            clipped(**{argument: np.array([1.0, 2.0])})
    with pytest.raises(ConfigurationError, match="no trainable layer '5', only '0', '2'"):
        clipped(uses={"5": 2})
    with pytest.raises(ConfigurationError, match=r"uses\['0'\] must be a whole number"):
        clipped(uses={"0": 0})
    with pytest.raises(ConfigurationError, match="grad_norm: give a number for layer '2' too"):
        clipped(grad_norm={"0": 1.0})
    with pytest.raises(ConfigurationError, match="clipped already"):
        clipped(clipped())
    with pytest.raises(ConfigurationError, match="no trainable layer to clip"):
        clipped(nn.ReLU())
    for mode in ("scale", 3):
        with pytest.raises(ConfigurationError, match="mode="):
            Backprop(mode=mode)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="split='half'"):
        Backprop(split="half")


def test_a_layer_without_a_bound_is_refused_by_name_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModelError, match=r"'1\.weight' belongs to a PReLU"):
        clipped(model)
    assert type(model[0]) is nn.Linear
    model[1].requires_grad_(False)
    assert isinstance(clipped(model)[0], layers.ClippedLayer)  # type: ignore[index]


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (nn.Embedding(5, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.LSTM(3, 4, proj_size=2), "proj_size"),
        (nn.MultiheadAttention(4, 2), "batch_first=True"),
        (nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=3), "kdim"),
        (nn.ConvTranspose2d(2, 3, 3), "ConvTranspose2d"),
        (nn.BatchNorm1d(3), "BatchNorm1d"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_options_without_a_bound_are_refused(layer: nn.Module, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        clipped(nn.Sequential(layer))


def test_parameters_stay_the_same_objects() -> None:
    model = network()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    after = list(clipped(model).parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    private_run(model, optimizer, clipping=Backprop())


def test_constants_a_layer() -> None:
    model = clipped(input_norm={"0": 3.0, "2": 2.0}, grad_norm={"0": 0.5, "2": 0.25})
    bounds = Backprop().attach(site(model)).bounds
    assert [b.sensitivity for b in bounds] == [1.5, 0.5, 0.5, 0.25]


def test_the_default_bound_is_the_smaller_one() -> None:
    model = layers.clip_inputs(network(), input_norm=1.0)
    found = {m.constants.bound for m in model.modules() if isinstance(m, layers.ClippedLayer)}
    assert found == {"gradient"}


# --------------------------------------------------------------------- Backprop


def test_a_model_without_clips_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="clip_inputs"):
        private_run(clipping=Backprop(1.0, 1.0))


def test_a_parameter_outside_of_the_clips_is_refused_by_name() -> None:
    model = nn.Sequential(clipped(nn.Sequential(nn.Linear(5, 4))), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModelError, match=r"'1\.weight' is trainable and in no clipped layer"):
        private_run(model, clipping=Backprop())


@pytest.mark.parametrize("argument", ["input_norm", "grad_norm"])
def test_its_own_constants_are_checked(argument: str) -> None:
    for value in (-1.0, math.nan, "a", [1.0], {"0": 0.0}):
        with pytest.raises(ConfigurationError, match=argument):
            Backprop(**{argument: value})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    model = clipped(input_norm=np.float32(2.0), grad_norm=np.float64(0.5))
    private_run(model, clipping=Backprop(np.int64(2), np.float32(0.5)))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="grad_norm"):
        clipped(grad_norm=np.array([1.0]))


def test_constants_that_disagree_with_the_layers_are_refused() -> None:
    for given in (Backprop(1.0), Backprop(2.0, 1.0), Backprop(mode="normalize")):
        with pytest.raises(ConfigurationError, match="layer '0' has"):
            private_run(clipped(), clipping=given)
    private_run(clipped(), clipping=Backprop(2.0, 0.5, "clip"))


def test_sensitivities_and_the_joint_multiplier() -> None:
    clipper = Backprop().attach(site(clipped(), Adjacency.REPLACE_ONE))
    assert [b.sensitivity for b in clipper.bounds] == [2.0, 1.0, 2.0, 1.0]
    for split in ("optimal", "equal"):
        _, private = private_run(clipped(), clipping=Backprop(split=split), noise_multiplier=0.8)
        parts = private.parts()
        assert [p.sensitivity for p in parts] == [1.0, 0.5, 1.0, 0.5]
        z = sum((p.sensitivity / p.noise_std) ** 2 for p in parts) ** -0.5
        assert math.isclose(z, 0.8) and private.divisor == 8


def test_the_rounding_of_tf32_is_stated_and_noised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose products run in TensorFloat-32."""
    monkeypatch.setattr("clipwise.clipping.backprop.chosen_arithmetic", lambda device: TF32)
    clipper = Backprop().attach(site(clipped()))
    assert [b.sensitivity for b in clipper.bounds] == [s * (1 + 2.0**-6) for s in (1.0, 0.5, 1.0, 0.5)]


def test_a_penalty_on_the_weights_in_the_loss_is_refused() -> None:
    model, private = private_run(clipped(), clipping=Backprop())
    for batch in private.loader:
        with pytest.raises(UnsupportedModelError, match=r"'0\.layer\.weight' is used outside.*weight_decay"):
            private.step(losses_of(model, batch) + model[0].layer.weight.square().sum())  # type: ignore[index, union-attr]
        break


class OneIntoTheOther(nn.Module):
    """A weight is the input of another layer: no clip bounds the gradient that it receives there."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        reader = self.one if self.own else self.other
        y: Tensor = self.other(self.one(x)) + reader(self.one.layer.weight)[: len(x)]  # type: ignore[operator]
        return y


@pytest.mark.parametrize("own", [False, True])
def test_a_weight_that_goes_into_a_clipped_layer_is_refused(own: bool) -> None:
    model = clipped(OneIntoTheOther(own), uses={"one": 2, "other": 2})
    clipper = Backprop().attach(site(model))
    by = "one" if own else "other"
    with pytest.raises(UnsupportedModelError, match=rf"'one\.layer\.weight' is used outside.*layer '{by}', as its"):
        clipper.clipped_sum(model(torch.randn(5, 5)).sum(1))


def test_a_weight_that_stands_in_for_another_layers_is_refused() -> None:
    """Two layers would each bound the gradient of one weight to the full stated sensitivity."""
    model = clipped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), uses={"0": 2, "2": 2})
    clipper, x = Backprop().attach(site(model)), torch.ones(3, 4)
    borrowed = torch.func.functional_call(model, {"0.layer.weight": model[2].layer.weight}, (x,))  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match=r"'2.layer.weight' is used outside of its clipped layer"):
        clipper.clipped_sum((model(x) + borrowed).square().sum(1))
    clipper.clipped_sum((model(x) + model(2 * x)).square().sum(1))


def test_a_number_of_uses_that_changes_between_draw_and_step_is_refused() -> None:
    """The graph would be allowed more uses than the noise is for."""
    model, private = private_run(clipped(), clipping=Backprop(), sampling="full")  # a batch larger than the change
    batch = next(iter(private.loader))
    model[0].uses = 5  # type: ignore[index, assignment]
    with pytest.raises(StepError, match="constants of layer '0' changed"):
        private.step(losses_of(model, batch))
    train(model, private, 1)
    assert private.parts()[0].sensitivity == 5.0


def test_losses_from_before_a_change_of_constants_are_refused() -> None:
    """Their graph clips to what was there when it was made."""
    model, private = private_run(clipped(), clipping=Backprop(), sampling="full")
    earlier = losses_of(model, next(iter(private.loader)))
    layers.set_clips(model, grad_norm=0.01)
    batch = next(iter(private.loader))
    with pytest.raises(StepError, match="changed after these losses"):
        private.step(earlier)
    private.step(losses_of(model, batch))


def test_nothing_is_released_while_clips_are_suspended() -> None:
    model, private = private_run(clipped(), clipping=Backprop(), sampling="full")
    losses = losses_of(model, next(iter(private.loader)))
    with unclipped(), pytest.raises(StepError, match="Clipping is turned off"):
        private.backward(losses)
    assert private.steps == 0 and model[0].layer.weight.grad is None  # type: ignore[index, union-attr]
    private.backward(losses)


def test_a_layer_that_is_used_more_often_than_declared_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.shared(self.shared(x))
            return y

    model, private = private_run(clipped(Twice()), clipping=Backprop())
    with pytest.raises(UnsupportedModelError, match=r"'shared' is used more than.*uses="):
        private.step(losses_of(model, next(iter(private.loader))))
    model, private = private_run(clipped(Twice(), uses={"shared": np.int64(2)}), clipping=Backprop())
    assert [p.sensitivity for p in private.parts()] == [2.0, 1.0]
    private.step(losses_of(model, next(iter(private.loader))))


def test_tied_weights_add_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(ids).mean(1))
            return y

    model = clipped(Tied())
    clipper = Backprop().attach(site(model))
    assert [b.sensitivity for b in clipper.bounds] == [0.5 + 1.0]
    ids = torch.randint(0, 7, (1, 3))
    found = clipper.clipped_sum(1e6 * model(ids).square().sum(1))
    assert float(found["table.layer.weight"].norm()) <= 1.5


def tied_in_a_layer(kind: str) -> nn.Module:
    """One tensor under two names of one layer."""
    torch.manual_seed(0)
    if kind == "normalization":
        norm = nn.LayerNorm(5)
        norm.bias = norm.weight
        return nn.Sequential(norm)
    run = nn.RNN(5, 5, num_layers=2, batch_first=True)
    for p in run.parameters():
        nn.init.constant_(p, 0.1)  # so that both uses pull in one direction
    if kind == "biases":
        run.bias_hh_l0 = run.bias_ih_l0
    else:
        run.weight_hh_l1 = run.weight_hh_l0
    return run


@pytest.mark.parametrize(
    ("kind", "name", "most"),
    [("biases", "bias_ih_l0", 1.0), ("weights", "weight_hh_l0", 2.0), ("normalization", "weight", 1.0)],
)
def test_weights_that_are_tied_within_a_layer_add_up(kind: str, name: str, most: float) -> None:
    """Each of its names is a use, and one example reaches more than the bound of one."""
    model = clipped(tied_in_a_layer(kind), mode="normalize")
    clipper = Backprop().attach(site(model))
    (bound,) = [b for b in clipper.bounds if b.name.endswith(name)]
    assert bound.sensitivity == most
    x = torch.ones(1, 3, 5) if kind != "normalization" else torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0]])
    y = model(x)
    found = clipper.clipped_sum((y if isinstance(y, Tensor) else y[0]).flatten(1)[:, -5:].sum(1))
    assert 0.5 * most < float(found[bound.name].norm()) <= most


def test_a_parametrization_of_a_clipped_layer_is_refused() -> None:
    model = clipped()
    nn.utils.parametrizations.weight_norm(model[0].layer)  # type: ignore[index, arg-type]
    with pytest.raises(UnsupportedModelError, match=r"Layer '0'.*original0.*weight_norm"):
        private_run(model, clipping=Backprop())


def test_reentrant_checkpoints_are_refused_by_every_strategy() -> None:
    for model, clipping in ((clipped(), Backprop()), (network(), PerExample(1.0))):
        _, private = private_run(model, clipping=clipping, sampling="full")
        x, y = next(iter(private.loader))
        losses = losses_of(lambda x, model=model: checkpoint(model, x, use_reentrant=True), (x, y))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
            private.step(losses)
    clipper = Backprop().attach(site(model := clipped()))
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        clipper.clipped_sum(checkpoint(model, torch.randn(3, 5, requires_grad=True), use_reentrant=True).sum(1))


@pytest.mark.slow
def test_a_compiled_model_is_refused_with_an_alternative() -> None:
    model = clipped()
    clipper = Backprop().attach(site(model))
    with pytest.raises(UnsupportedModelError, match=r"outside of its clipped layer.*private\.compiled"):
        clipper.clipped_sum(torch.compile(model, backend="eager")(torch.randn(3, 5)).sum(1))


class TimeFirst(nn.Module):
    """Rows of the layer are positions, all examples in each: just as many as there are examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x.t().unsqueeze(-1)).sum(0)
        return y


@pytest.mark.slow
def test_rows_that_are_not_examples_are_refused() -> None:
    model = clipped(TimeFirst())
    clipper = Backprop().attach(site(model))
    with pytest.raises(CoupledExamplesError, match="Layer 'first' does not have one row for each example"):
        clipper.clipped_sum(model(torch.randn(5, 5)).square().sum(1))
    with pytest.raises(StepError, match="Layer 'first' clips rows, but the number"):
        clipper.clipped_sum(model(torch.randn(4, 5)).square().sum(1))


def test_coupled_losses_are_refused() -> None:
    for mode in ("clip", "normalize"):
        model, private = private_run(clipped(mode=mode), clipping=Backprop())
        with pytest.raises(CoupledExamplesError, match="depends on the inputs of another"):
            for x, y in private.loader:
                outputs = model(x)
                private.step(losses_of(nn.Identity(), (outputs - outputs.mean(0), y)))


def test_augmentation_multiplicity_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="augmentation_multiplicity is not supported with Backprop"):
        private_run(clipped(), clipping=Backprop(), augmentation_multiplicity=2)
    model, private = private_run(clipped(), clipping=Backprop())
    with pytest.raises(StepError, match="clips rows, but the number"):  # views made by hand
        for x, y in private.loader:
            losses = losses_of(model, (torch.cat([x, x]), torch.cat([y, y])))
            private.step(losses.view(2, -1).mean(0))


@pytest.mark.parametrize("mode", ["clip", "normalize"])
def test_pieces_of_a_batch_give_the_same(mode: str) -> None:
    runs = []
    for size in (None, 3):
        model, private = private_run(
            clipped(mode=mode), clipping=Backprop(), seed=5, max_physical_batch_size=size, noise_multiplier=0
        )
        train(model, private, 3)
        runs.append([p.detach() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_configuration_is_json_and_distinguishes_runs() -> None:
    found = set()
    for options in ({}, {"grad_norm": 1.0}, {"mode": "normalize"}, {"bound": "upstream"}, {"uses": {"0": 2}}):
        clipper = Backprop().attach(site(clipped(**options)))
        found.add(json.dumps(Backprop().describe() | clipper.state_dict()))
    assert len(found) == 5


def test_a_run_states_what_it_did() -> None:
    model, private = private_run(clipped(), clipping=Backprop(), noise_multiplier=1.0)
    train(model, private, 6)
    text = str(private.statement())
    assert "0.layer.weight: 1" in text and "probed on the first batches" in text
    expected = clipwise.accounting.epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=6, delta=private.spent().delta)
    assert math.isclose(private.spent().epsilon, expected, rel_tol=1e-6)


@pytest.mark.slow
def test_it_learns() -> None:
    torch.manual_seed(0)
    model = clipped(input_norm=5.0, mode="normalize")
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    x, _ = data().tensors
    rows = TensorDataset(x, x[:, :3].argmax(1))
    _, private = private_run(model, optimizer, rows, clipping=Backprop(), noise_multiplier=0.1)
    train(model, private, 150)
    assert (model(x).argmax(1) == rows.tensors[1]).float().mean() > 0.75


def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Any) -> None:
    def run(stop: int | None) -> list[Tensor]:
        path = tmp_path / f"ledger-{stop}"
        model, private = private_run(clipped(), clipping=Backprop(), seed=1, ledger=path)
        train(model, private, stop or 6)
        if stop is not None:
            saved, weights = private.state_dict(), model.state_dict()
            private.close()
            model, private = private_run(clipped(), clipping=Backprop(), seed=1, ledger=path)
            model.load_state_dict(weights)
            private.load_state_dict(saved)
            train(model, private, 6 - stop)
        private.close()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(run(None), run(5), strict=True):
        assert torch.equal(a, b)


def test_check_names_what_would_be_refused() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, (x, y))

    batch = data().tensors
    assert clipwise.check(clipped(), loss, batch, Backprop()).ok
    assert clipwise.check(clipped(mode="normalize"), loss, batch, Backprop()).ok
    assert "clip_inputs" in str(clipwise.check(network(), loss, batch, Backprop()))
    penalized = clipwise.check(clipped(), lambda m, x, y: loss(m, x, y) + m[0].layer.weight.sum(), batch, Backprop())
    assert "used outside" in str(penalized)


def test_check_takes_backprop_for_a_clipped_model() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, (x, y))

    batch = data().tensors
    for model in (clipped(), clipped(mode="normalize")):
        assert clipwise.check(model, loss, batch).ok
    assert "layer '0' has 2.0" in str(clipwise.check(clipped(), loss, batch, Backprop(5.0)))
    assert "float32" in str(clipwise.check(clipped().bfloat16(), lambda m, x, y: loss(m, x.bfloat16(), y), batch))
    train_it, rows = run_of(clipped(), loss, batch)
    train_it(rows)  # as `clipwise check --neighbours` does


def test_other_strategies_refuse_a_model_that_is_clipped_for_backprop() -> None:
    with pytest.raises(UnsupportedModelError, match=r"clipped layers for Backprop \(the first is '0'\)"):
        private_run(clipped(), clipping=PerExample(1.0))
    model = nn.Sequential(clipped(), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    _, private = private_run(model, torch.optim.SGD(model[1].parameters(), 0.1), clipping=PerExample(1.0))
    train(model, private, 2)


# ------------------------------------------------------------------ state_dict


def test_weights_bring_the_clips_they_were_trained_with(tmp_path: Any) -> None:
    model, x = clipped(input_norm={"0": 0.7, "2": 0.9}), 10 * torch.randn(4, 5)
    other = clipped(network(seed=1), grad_norm=3.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), model(x)) and repr(other) == repr(model)
    for options, words in (
        ({"mode": "normalize"}, "other settings.*mode='clip', bound='gradient'"),
        ({"bound": "upstream"}, "bound='gradient'.*before you load it"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            clipped(**options).load_state_dict(model.state_dict())


def test_weights_without_clips_load_only_without_strict() -> None:
    plain, model = network(seed=1), clipped()
    named = {name.replace(".", ".layer."): p for name, p in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match="_extra_state"):
        model.load_state_dict(named)
    model.load_state_dict(named, strict=False)
    assert torch.equal(model[0].layer.weight, plain[0].weight)  # type: ignore[index, union-attr]
    assert model[0].constants.input_norm == 2.0  # type: ignore[index, union-attr]


# -------------------------------------------------- what torch does to a model


def test_activation_checkpointing_changes_nothing() -> None:
    model = clipped()
    clipper = Backprop().attach(site(model))
    x = torch.randn(6, 5)
    plain = clipper.clipped_sum(100 * model(x).square().sum(1))
    again = clipper.clipped_sum(100 * checkpoint(model, x, use_reentrant=False).square().sum(1))
    for name, total in plain.items():
        torch.testing.assert_close(again[name], total)


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("name", CASES)
def test_autocast_keeps_the_bound(name: str, mode: str) -> None:
    case = CASES[name]
    model = clipped_case(case, mode=mode).float()
    clipper = Backprop().attach(site(model))
    for scale in (1.0, 1e4):
        x = inputs(case, 1, scale)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # As behind another layer: recurrent layers hand their inputs on as they are.
            y = model(x if case.ids else x.bfloat16()).float()
        found = clipper.clipped_sum(1e3 * y.square().flatten(1).sum(1))
        for b in clipper.bounds:
            assert found[b.name].dtype == torch.float32
            assert float(found[b.name].norm()) <= b.sensitivity


# ------------------------------------------------------------------- accounting


def test_the_papers_scheme_costs_twice_the_sensitivity_in_every_layer() -> None:
    """rho = E N (2 C1 C2)^2 / (2 s^2): disjoint batches, one Gaussian release per epoch, N parts of equal noise."""
    C1, C2, epochs = 2.0, 0.5, 3
    without_bias = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    model, private = private_run(
        clipped(without_bias, input_norm=C1, grad_norm=C2),
        clipping=Backprop(split="equal"),
        sampling="shuffled",
        adjacency="replace-one",
        noise_multiplier=1.3,
    )
    train(model, private, 5 * epochs)
    noise = [part.noise_std for part in private.parts()]
    assert len(noise) == 2 and math.isclose(*noise)
    rho = epochs * 2 * (2 * C1 * C2) ** 2 / (2 * noise[0] ** 2)
    spent = private.spent(accountant="zcdp")
    assert math.isclose(spent.epsilon, zcdp.tight_epsilon(rho, spent.delta), rel_tol=1e-6)


def test_the_papers_baseline_costs_every_layer() -> None:
    """Algorithm 1 clips each layer's gradient to C: rho = E N (2C)^2 / (2 s^2), and not E C^2 / (2 s^2)."""
    C, epochs = 0.7, 3
    model, private = private_run(
        clipping=PerExample(max_norm={"0": C, "2": C}, parts="layer", split="equal"),
        sampling="shuffled",
        adjacency="replace-one",
        noise_multiplier=1.3,
    )
    train(model, private, 5 * epochs)
    noise = private.parts()[0].noise_std
    rho = epochs * 2 * (2 * C) ** 2 / (2 * noise**2)
    spent = private.spent(accountant="zcdp")
    assert math.isclose(spent.epsilon, zcdp.tight_epsilon(rho, spent.delta), rel_tol=1e-6)


# ----------------------------------------------------------------------- export


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


def test_an_exported_model_keeps_its_clips() -> None:
    torch.manual_seed(0)
    model = clipped(images()).eval()
    example, x = torch.randn(2, 1, 4, 4), 100 * torch.randn(2, 1, 4, 4)
    with torch.no_grad():
        expected, larger = model(x), model(10 * x)
    torch.testing.assert_close(expected, larger)  # the first input is clipped, so its scale has no effect
    exported = torch.export.export(model, (example,)).module()
    torch.testing.assert_close(exported(x), expected)
    traced = torch.jit.trace(model, (example,))
    torch.testing.assert_close(traced(x), expected)


def test_a_saved_model_can_be_loaded(tmp_path: Any) -> None:
    model = clipped(images())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = clipped(images())
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(model(x), again(x))


def test_torch_encoder_layers_keep_their_clips_in_evaluation() -> None:
    """torch has a way past the modules for evaluation, which would leave the clips out."""
    torch.manual_seed(0)
    model = clipped(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), input_norm=0.5)
    x = torch.randn(3, 4, 8)
    trained = model(x)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained)
    clipper = Backprop().attach(site(model))
    clipper.clipped_sum(model(x).square().mean((1, 2)))


def test_a_second_clipped_layer_around_the_same_weights_is_refused() -> None:
    shared = nn.Linear(5, 3, bias=False)
    one, two = nn.Sequential(shared), nn.Sequential(shared)
    layers.clip_inputs(one, input_norm=1.0, grad_norm=1.0)
    layers.clip_inputs(two, input_norm=1e3, grad_norm=1e3)
    clipper = Backprop().attach(site(one))
    x = torch.randn(4, 5)
    with pytest.raises(UnsupportedModelError, match="not in the model of this run"):
        clipper.clipped_sum((one(x) + two(x)).sum(1))
    clipper.clipped_sum(one(x).sum(1))


class Repeated(nn.Module):
    """An encoder layer over words; on words that are all the same, nothing depends on queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(self.norm(self.table(x))).mean(1))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["upstream", "gradient"])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_rounding_of_other_records_is_not_made_a_gradient_of(bound: str, scale: float) -> None:
    """It changes with the batch: if it were, to take out one record would move the parts of all others."""
    x, y = torch.full((8, 6), 3), torch.arange(8) % 5
    for seed in range(6):
        torch.manual_seed(seed)
        model = clipped(Repeated(), input_norm=1.3, grad_norm=0.7, mode="normalize", bound=bound)
        clipper = Backprop().attach(site(model))
        most = {b.name: b.sensitivity for b in clipper.bounds}

        def summed(rows: list[int]) -> Mapping[str, Tensor]:
            return clipper.clipped_sum(scale * F.cross_entropy(model(x[rows]), y[rows], reduction="none"))

        everybody = summed(list(range(8)))
        for one in range(8):
            rest = summed([i for i in range(8) if i != one])
            for name, bound_ in most.items():
                assert float((everybody[name] - rest[name]).norm()) <= bound_ * (1 + 1e-5), (name, seed, one)


class Pointer(nn.Module):
    """Coupled over the batch in one place: by the weights of attention (a pointer network), or by its output."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(50, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.table.requires_grad_(False)  # ids: no gradient of an input shows the coupling
        self.by = by
        if by != "output":
            self.attention.out_proj.requires_grad_(False)
        if by == "weights, by keys alone":
            self.attention.in_proj_weight.data[6:12] = 0  # the queries get no gradient, the keys do

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        output, weights = self.attention(h, h, h)
        y: Tensor = (output if self.by == "output" else weights).flatten(1)
        return 9 * y * y.mean(0)


@pytest.mark.parametrize("by", ["output", "weights", "weights, by keys alone"])
def test_coupling_through_any_of_queries_keys_and_values_is_detected(by: str) -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randint(0, 50, (40, 4)), torch.zeros(40, dtype=torch.long))
    model, private = private_run(clipped(Pointer(by)), None, dataset, clipping=Backprop(), sampling="full")
    with pytest.raises(CoupledExamplesError, match="'attention' does not have one row"):
        private.step(losses_of(model, next(iter(private.loader))))


def few_numbers(norm: nn.Module, *, first: bool = False) -> nn.Module:
    shapes = [nn.Unflatten(1, (2, 1, 2)), norm, nn.Flatten()]
    return nn.Sequential(*([] if first else [nn.Linear(5, 4)]), *shapes, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.LayerNorm(2), "Layer '2'"),
        (nn.LayerNorm(2, elementwise_affine=False), "A normalization"),
        (nn.GroupNorm(2, 2), "Layer '2'"),
        (nn.GroupNorm(2, 2, affine=False), "A normalization"),
    ],
)
def test_normalizations_of_few_numbers_are_refused_where_gradients_are_normalized(norm: nn.Module, name: str) -> None:
    x = torch.randn(6, 5)
    for mode in ("clip", "normalize"):
        model = clipped(few_numbers(copy.deepcopy(norm)), mode=mode)
        losses = model(x).square().sum(1)
        if mode == "clip":
            Backprop().attach(site(model)).clipped_sum(losses)
            continue
        with pytest.raises(UnsupportedModelError, match=rf"{name} normalizes groups of 2 numbers"):
            Backprop().attach(site(model)).clipped_sum(losses)
    # Nothing behind it is trained; inputs carry gradients while a probe runs.
    dataset = TensorDataset(torch.randn(40, 4), torch.zeros(40, dtype=torch.long))
    model = clipped(few_numbers(copy.deepcopy(norm), first=True), mode="normalize")
    _, private = private_run(model, None, dataset, clipping=Backprop())
    train(model, private, 3)
    model = clipped(few_numbers(copy.deepcopy(norm), first=True), mode="normalize")
    Backprop().attach(site(model)).clipped_sum(model(x[:, :4]).square().sum(1))
    model = clipped(few_numbers(nn.LayerNorm((1, 2)) if isinstance(norm, nn.LayerNorm) else nn.GroupNorm(1, 2)))
    Backprop().attach(site(model)).clipped_sum(model(x).square().sum(1))


def test_an_encoder_with_padding_can_be_evaluated() -> None:
    """torch would read the weights of its layers to make nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = clipped(nn.TransformerEncoder(layer, 2), input_norm=0.5)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    trained = model(x, src_key_padding_mask=padding)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), trained)
