"""Lipschitz: settings, errors, and invariants over steps."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clipwise
from clipwise import Lipschitz, Private, lipschitz
from clipwise.contrib import RandomLayer
from clipwise.errors import CheckpointError, ConfigurationError, CoupledExamplesError, StepError, UnsupportedModelError
from clipwise.gradients.precision import TF32
from clipwise.layers import ClipInput
from clipwise.lipschitz import bounds_of, trace
from clipwise.lipschitz.bounds import measured_norms
from clipwise.lipschitz.weights import clip_and_measure_, limits_of
from clipwise.privacy import effective_multiplier
from tests.runs import CLASSES, FEATURES, HIDDEN, data, parameters, private_run, same, sgd
from tests.sites import site

X, C = 2.0, 0.7


def network(*layers: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inner = layers or (nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        return nn.Sequential(ClipInput(X), *inner)


def run(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Private]:
    strategy = Lipschitz(C, X, **options.pop("strategy", {}))
    return private_run(network() if model is None else model, **{"clipping": strategy, **options})


def train(model: nn.Module, private: Private, steps: int) -> None:
    while steps:
        for x, y in private.loader.pieces():
            outputs = model(x)
            steps -= private.step(F.cross_entropy(outputs, y, reduction="none"), outputs=outputs)
            if not steps:
                return


def norms(model: nn.Module, kind: str) -> list[float]:
    order = 2 if kind == "spectral" else "fro"
    return [
        float(torch.linalg.matrix_norm(p.detach().double(), order) if p.ndim > 1 else p.detach().norm())
        for p in model.parameters()
    ]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", ["spectral", "frobenius"])
def test_weights_stay_within_their_norm_and_bounds_belong_to_them(kind: str, fixed: bool) -> None:
    model, private = run(strategy={"norm": kind, "fixed": fixed})
    first = [p.sensitivity for p in private.parts()]
    for _ in range(4):
        assert max(norms(model, kind)) <= C
        found = trace(model, (FEATURES,))
        constant = lipschitz.SoftmaxCrossEntropy().constant((CLASSES,))
        fresh = bounds_of(found, constant, limits=limits_of(found, C) if fixed else None).sensitivities
        for part in private.parts():
            assert fresh[part.name] * (1 - 1e-12) <= part.sensitivity <= fresh[part.name] * (1 + 1e-5)
        assert effective_multiplier(private.parts()) == pytest.approx(1.0, rel=1e-9)
        assert effective_multiplier(private.parts()) >= private.noise_multiplier
        train(model, private, 1)
    assert (first == [p.sensitivity for p in private.parts()]) == fixed
    assert any(private.on_limit().values()) and private.on_limit().keys() == dict(private._context.parameters).keys()


@pytest.mark.parametrize("kind", ["spectral", "frobenius"])
def test_fixed_rescales_every_weight_to_its_norm(kind: str) -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.mul_(1e-3)  # far below C
        model[3].weight.mul_(1e3)  # far above
    _, private = run(model, strategy={"norm": kind, "fixed": True})
    for _ in range(3):
        first, _, second, _ = norms(model, kind)
        assert C * (1 - 1e-5) < first <= C and C * (1 - 1e-5) < second <= C
        assert private.on_limit()["1.weight"] and private.on_limit()["3.weight"]
        train(model, private, 1)


def test_fixed_clips_biases_and_leaves_zeros() -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.zero_()  # no direction: it cannot be rescaled
        model[1].bias.fill_(1e-3)
        model[3].bias.fill_(1e3)
    _, private = run(model, strategy={"fixed": True})
    assert not model[1].weight.any()
    first, bias, second, other = norms(model, "spectral")
    assert first == 0 and bias == pytest.approx(1e-3 * HIDDEN**0.5) and C * (1 - 1e-5) < second <= C
    assert C * (1 - 1e-5) < other <= C
    assert private.on_limit() == {"1.weight": False, "1.bias": False, "3.weight": True, "3.bias": True}


def test_fixed_leaves_weights_that_are_at_their_norm_as_they_are() -> None:
    """Otherwise a resumed run would continue with other bits."""
    model, private = run(strategy={"fixed": True})
    train(model, private, 1)
    before = parameters(model)
    for _ in range(3):
        private._context.clipper.follow(is_updated=True)
    assert same(parameters(model), before)


def test_fixed_brings_the_longest_row_of_a_table_to_its_norm() -> None:
    table = nn.Embedding(6, HIDDEN)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(HIDDEN, CLASSES))
    lengths = table.weight.detach().norm(dim=1)
    dataset = torch.utils.data.TensorDataset(torch.arange(40)[:, None] % 6, torch.arange(40) % CLASSES)
    _, private = private_run(model, dataset=dataset, clipping=Lipschitz(C, None, fixed=True))
    found = table.weight.detach().norm(dim=1)
    torch.testing.assert_close(found, lengths * C / lengths.max(), rtol=1e-5, atol=0)
    assert found.max() <= C
    private.close()


def test_what_is_not_clipped_is_the_ordinary_gradient() -> None:
    """A loss within its constant is left as it is: the sum of plain gradients over the expected size."""
    model, private = run(noise_multiplier=0.0)
    x, y = next(iter(private.loader))
    outputs = model(x)
    assert private.backward(F.cross_entropy(outputs, y, reduction="none"), outputs)
    found = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    expected = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum") / 8, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_norms_for_the_clip_serve_the_bounds_too() -> None:
    """Measured once and scaled: never below those of the clipped weights, and next to nothing above."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = network(
            nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.LeakyReLU()
        )
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3 * torch.rand(()))
        found = trace(model, (1, 8, 8))
        scaled, ratios = clip_and_measure_(found, limits_of(found, C), "spectral", "spectral")
        for op, measured in measured_norms(found, "spectral").items():
            for name, value in measured.items():
                assert value <= scaled[op][name] <= value * (1 + 1e-4) + 1e-12, name
        assert ratios.keys() == {name for name, _ in model.named_parameters()}


def test_each_layer_may_have_its_own_norm_and_what_is_frozen_stays() -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.mul_(50)
    for p in model[1].parameters():
        p.requires_grad_(False)
    before = model[1].weight.clone()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    strategy = Lipschitz({"1": 9.0, "3.weight": 0.2, "3.bias": 0.1}, X)
    model, private = private_run(model, optimizer, clipping=strategy)
    train(model, private, 2)
    assert torch.equal(model[1].weight, before)  # type: ignore[index]
    assert norms(model[3], "spectral")[0] <= 0.2 and norms(model[3], "spectral")[1] <= 0.1  # type: ignore[index]
    assert [p.name for p in private.parts()] == ["3.weight", "3.bias"]
    assert private.parts()[0].sensitivity > 2  # the frozen layer is large, and counts as it is


def test_replacing_costs_twice_as_much_and_parts_may_be_layers() -> None:
    _, one = run(sampling="shuffled", adjacency="zero-out")
    _, two = run(sampling="shuffled", adjacency="replace-one")
    for mine, theirs in zip(one.parts(), two.parts(), strict=True):
        assert theirs.sensitivity == 2 * mine.sensitivity
    _, layers = run(strategy={"parts": "layer"})
    assert [p.name for p in layers.parts()] == ["1", "3"]
    whole = sum(p.sensitivity**2 for p in run()[1].parts()) ** 0.5
    assert sum(p.sensitivity**2 for p in layers.parts()) ** 0.5 == pytest.approx(whole, rel=1e-6)


def test_pieces_of_a_batch_change_nothing() -> None:
    finished = []
    for size in (None, 3):
        model, private = run(max_physical_batch_size=size, seed=5)
        train(model, private, 4)
        finished.append(parameters(model))
    for name in finished[0]:
        assert torch.allclose(finished[0][name], finished[1][name], rtol=1e-5, atol=1e-6)


def test_weights_stay_while_a_batch_comes_in_pieces() -> None:
    """With smaller weights there is less noise, which would not do for pieces that were gathered before."""
    model, private = run(sampling="full", max_physical_batch_size=9)
    pieces = iter(private.loader.pieces())

    def step() -> bool:
        x, y = next(pieces)
        outputs = model(x)
        return private.step(F.cross_entropy(outputs, y, reduction="none"), outputs)

    assert not step() and not step()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.01)
    private.declare_update("post-processing", "smaller weights")
    with pytest.raises(StepError, match="between two pieces of a batch"):
        step()
    assert private.steps == 0
    train(model, private, 1)
    assert private.steps == 1


def test_an_empty_draw_releases_noise_and_counts() -> None:
    model, private = run(sample_rate=1e-9)
    before = parameters(model)
    x, y = next(iter(private.loader))
    assert len(x) == 0
    outputs = model(x)
    assert private.step(F.cross_entropy(outputs, y, reduction="none"), outputs)
    assert private.steps == 1 and not same(before, parameters(model))


Steps = Callable[[nn.Module, Private, int], None]


def looking(model: nn.Module, private: Private, count: int) -> None:
    """Reading averages and parts between steps changes no weights."""
    for _ in range(count):
        train(model, private, 1)
        bounds = private.parts()
        with private.ema.applied():
            assert private.ema.updates == private.steps and private.parts() == bounds


@pytest.mark.parametrize("steps", [train, looking])
def test_it_resumes_bit_for_bit(steps: Steps, tmp_path: Path) -> None:
    whole, private = run(seed=3, ema=0.5)
    steps(whole, private, 6)
    model, first = run(seed=3, ema=0.5, ledger=tmp_path / "ledger")
    steps(model, first, 3)
    state, weights = first.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    first.close()
    model, second = run(seed=3, ema=0.5, ledger=tmp_path / "ledger")
    model.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(state)
    assert second.parts() == first.parts()  # at once: they follow from the weights that were loaded
    steps(model, second, 3)
    assert same(parameters(whole), parameters(model))
    averages = [r.ema.state_dict()["averages"] for r in (private, second)]
    assert same(*averages)
    second.close()


def test_norms_of_a_checkpoint_are_not_believed() -> None:
    model, private = run()
    train(model, private, 2)
    state = private.state_dict()
    saved = state["configuration"]["strategy"]["weight_norms"]
    saved["_1"]["weight"] *= 0.9995
    saved["_3"]["operator" if "operator" in saved["_3"] else "frobenius"] *= 0.5
    other, second = run()
    other.load_state_dict(model.state_dict())
    with pytest.warns(match="fresh secret"):
        second.load_state_dict(state)
    next(iter(second.loader))
    fresh = bounds_of(trace(other, (FEATURES,)), 2**0.5).sensitivities
    assert all(p.sensitivity >= fresh[p.name] * (1 - 1e-12) for p in second.parts())
    del saved["_3"]
    other, third = run()
    other.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match="norms of the weights"):
        third.load_state_dict(state)


class BySlice(torch.optim.Optimizer):
    """Writes through `.data`, which torch does not count as a change."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(7.0)


@pytest.mark.parametrize("by_hand", [False, True])
def test_every_update_is_detected(by_hand: bool) -> None:
    model = network()
    model, private = run(model, optimizer=BySlice(model.parameters()))
    for x, y in private.loader:
        assert max(norms(model, "spectral")) <= C
        outputs = model(x)
        losses = F.cross_entropy(outputs, y, reduction="none")
        if by_hand:
            private.backward(losses, outputs)
            private.optimizer.step()
        else:
            private.step(losses, outputs)
            assert max(norms(model, "spectral")) <= C
    for p in model.parameters():
        p.data.mul_(5.0)
    private.declare_update("post-processing", "larger weights")
    next(iter(private.loader))
    assert max(norms(model, "spectral")) <= C


def test_weights_changed_behind_the_back_of_a_batch_are_refused() -> None:
    model, private = run(probe_independence=False)
    private._context.guard._tensors_left = 0  # it compares contents on the first batches only
    x, y = next(iter(private.loader))
    model[3].weight.data.mul_(2)  # type: ignore[index,union-attr]
    outputs = model(x)
    with pytest.raises(StepError, match=r"'3.weight' is not what the last release"):
        private.step(F.cross_entropy(outputs, y, reduction="none"), outputs)


def test_also_where_their_lengths_stay() -> None:
    """Numbers in another order have another spectral norm: torch counts the change, lengths do not show it."""
    model = network()
    clipper = Lipschitz(C, X, input_shape=(FEATURES,)).attach(site(model))
    with torch.no_grad():
        weight = model[3].weight
        weight.copy_(weight.clone().flatten().roll(1).view_as(weight))
    outputs = model(torch.ones(4, FEATURES))
    with pytest.raises(StepError, match="weights were changed"):
        clipper.sum_at_outputs(outputs.square().sum(1), outputs)


def test_arithmetic_that_is_coarser_than_the_bounds_allow_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = run()
    train(model, private, 1)
    monkeypatch.setattr("clipwise.clipping.lipschitz.chosen_arithmetic", lambda device: TF32)
    with pytest.raises(StepError, match="set_float32_matmul_precision was lowered"):
        train(model, private, 1)


def test_no_part_is_without_noise() -> None:
    """Behind weights of 0 the gradient is 0: its bound is close to 0, and float32 would lose such a noise."""
    model = network()
    nn.init.zeros_(model[3].weight)
    _, private = run(model)
    assert min(p.sensitivity for p in private.parts()) == 1e-12
    assert all(p.noise_std > 1e-13 for p in private.parts())


def test_the_statement_states_that_bounds_follow_the_weights() -> None:
    model, private = run()
    train(model, private, 1)
    text = str(private.statement())
    assert "bounds are recomputed from the released weights" in text and "bounded by the norms of the weights" in text
    assert "the graph of every step is compared" in text.replace("\n", " ")
    model, private = run(strategy={"fixed": True})
    train(model, private, 1)
    fixed = str(private.statement())
    assert "recomputed from the released weights" not in fixed
    assert "rescaled to max_weight_norm" in " ".join(fixed.split())


# What is refused, and how.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Any, str]] = {
    "no clip": (lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)), r"ClipInput\(input_norm\)"),
    "batch norm": (
        lambda: network(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
        r"'2' \(BatchNorm1d\).*BoundedGroupNorm",
    ),
    "group norm": (lambda: network(nn.Linear(FEATURES, 4), nn.GroupNorm(1, 4), nn.Linear(4, CLASSES)), "'2'"),
    "attention": (lambda: network(nn.Unflatten(1, (-1, 1)), Attention()), "'2"),
    "a mean over the batch": (lambda: network(nn.Linear(FEATURES, CLASSES), Centred()), "examples"),
    "unused": (lambda: network(nn.Linear(FEATURES, CLASSES), Idle()), "'2.idle'"),
    "too large": (lambda: network(*(nn.Linear(5, 5) for _ in range(30))), "max_weight_norm"),
}


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_bound_is_refused_by_name(what: str) -> None:
    build, message = REFUSED[what]
    model = build()
    limit = 50.0 if what == "too large" else 1.0
    if what == "too large":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1000)
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=message):
        private_run(model, clipping=Lipschitz(limit, X))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another input norm": ({"input_norm": 1.0}, "clips its inputs to 2"),
    "no input norm": ({"input_norm": None}, "input_norm=None, but the model clips its inputs to 2"),
    "an input norm of 0": ({"input_norm": 0.0}, "input_norm must be a finite number that is greater than 0"),
    "a policy": ({"parts": RandomLayer()}, r"parts=RandomLayer\(\.\.\.\) chooses clipping norms for gradients"),
    "norm": ({"norm": "nuclear"}, "norm='nuclear'"),
    "split": ({"split": "fair"}, "split='fair'"),
    "loss": ({"loss": F.cross_entropy}, "BoundedLoss"),
    "temperature twice": ({"temperature": 2.0, "loss": lipschitz.Huber()}, "temperature"),
    "temperature": ({"temperature": 0.0}, "temperature"),
    "weights": ({"max_weight_norm": -1.0}, "max_weight_norm"),
    "unknown layer": ({"max_weight_norm": {"1": 1.0, "3": 1.0, "5": 1.0}}, "'5'"),
    "a place, and no name": ({"max_weight_norm": {1: 1.0, 3: 1.0}}, "max_weight_norm: 1 is no parameter"),
    "missing layer": ({"max_weight_norm": {"1": 1.0}}, "'3.weight'"),
    "shape": ({"input_shape": (3,)}, "input_shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_settings_are_refused(what: str) -> None:
    changed, message = BAD[what]
    options = {"max_weight_norm": C, "input_norm": X, **changed}
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=message):
        private_run(network(), clipping=Lipschitz(**options))


def test_users_are_not_protected_by_it() -> None:
    with pytest.raises(ConfigurationError, match="Lipschitz bounds the contribution of a single record"):
        run(group=[0] * 40)


def step_with(change: Any, **options: Any) -> None:
    model, private = run(probe_independence=False, **options)
    x, y = next(iter(private.loader))
    assert len(x) > 1
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    private.step(*change(model, x, losses, outputs))


BAD_STEPS: dict[str, tuple[Any, type[Exception], str]] = {
    "no outputs": (lambda m, x, loss, o: (loss,), StepError, "outputs=outputs"),
    "a penalty": (lambda m, x, loss, o: (loss + m[1].weight.norm(), o), StepError, r"'1\.weight'.*penalty"),
    "two passes": (lambda m, x, loss, o: (loss, m(x)), StepError, "other than through outputs"),
    "coupled": (lambda m, x, loss, o: (loss - loss.mean() / 2, o), CoupledExamplesError, "outputs of another"),
    "weighted by all": (lambda m, x, loss, o: (loss * loss.sum(), o), CoupledExamplesError, "outputs of another"),
    "hidden values": (lambda m, x, loss, o: (loss + m[:2](x).sum(1), o), StepError, "other than through outputs"),
    "scaled outputs": (lambda m, x, loss, o: ((3 * o).sum(1), 3 * o), UnsupportedModelError, "traced model"),
    "no tensor": (lambda m, x, loss, o: (loss, [o]), StepError, "outputs"),
    "fewer rows": (lambda m, x, loss, o: (loss, o[:-1]), UnsupportedModelError, "outputs"),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_steps_that_would_not_be_bounded_are_refused(what: str) -> None:
    change, error, message = BAD_STEPS[what]
    with pytest.raises(error, match=message):
        step_with(change)


HOOKS: dict[str, Any] = {
    "forward": lambda m, o: m[1].register_forward_hook(lambda module, args, out: 100 * out),
    "before": lambda m, o: m[3].register_forward_pre_hook(lambda module, args: (100 * args[0],)),
    "backward": lambda m, o: m[3].register_full_backward_hook(lambda module, into, out: (100 * into[0],)),
    "parameter": lambda m, o: m[3].weight.register_hook(lambda g: 100 * g),
    "outputs": lambda m, o: o.register_hook(lambda g: 100 * g),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_that_come_after_the_trace_are_refused(where: str, late: bool) -> None:
    """Before the first step nothing was compared yet, so a graph with the hook would be taken as the reference."""
    model, private = run(probe_independence=False)
    if late:
        train(model, private, 1)
    if where != "outputs":
        HOOKS[where](model, None)
    x, y = next(iter(private.loader))
    outputs = model(x)
    if where == "outputs":
        HOOKS[where](model, outputs)
    with pytest.raises((ConfigurationError, StepError, UnsupportedModelError), match="hook"):
        private.step(F.cross_entropy(outputs, y, reduction="none"), outputs)


def test_settings_that_change_after_the_trace_are_refused() -> None:
    layers = (nn.Dropout(0.1), nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(0.1), nn.Linear(HIDDEN, CLASSES))
    for place, name, value in ((0, "max_norm", 9.0), (1, "p", 0.9), (3, "negative_slope", 5.0)):
        model, private = run(network(*layers))
        setattr(model[place], name, value)  # type: ignore[index]
        with pytest.raises(StepError, match=f"layer '{place}'"):
            train(model, private, 1)


def test_a_compiled_step_refuses_a_strategy_that_needs_outputs() -> None:
    model, private = run()
    with pytest.raises(ConfigurationError, match="compiled cannot pass the model's outputs"):
        private.compiled(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))


def test_views_of_an_example_count_as_one() -> None:
    model, private = run(augmentation_multiplicity=3, noise_multiplier=0.0)
    x, _ = next(iter(private.loader))
    outputs = model(x)
    assert private.backward(1e6 * outputs[:, 0], outputs)
    constant = lipschitz.SoftmaxCrossEntropy().constant((CLASSES,))
    # Every row pulls at one output, so nothing cancels: sum_i 3 (L / 3) over 8.
    assert float(model[3].bias.grad[0]) == pytest.approx(len(x) / 3 * constant / 8, rel=1e-5)  # type: ignore[index]


def test_strategies_that_need_no_outputs_take_them() -> None:
    found = []
    for gives in (False, True):
        model, private = private_run(seed=1)
        x, y = next(iter(private.loader))
        outputs = model(x)
        private.step(F.cross_entropy(outputs, y, reduction="none"), outputs if gives else None)
        found.append(parameters(model))
        assert private.on_limit() == {}
    assert same(*found)


def test_numbers_of_numpy_are_numbers() -> None:
    for given in (np.float32(0.5), {"1": np.float32(0.5), "3": np.float64(0.5)}):
        _, private = private_run(network(), clipping=Lipschitz(given, X))
        _, plain = private_run(network(), clipping=Lipschitz(0.5, X))
        assert [p.sensitivity for p in private.parts()] == [p.sensitivity for p in plain.parts()]
        assert json.dumps(private._context.strategy.describe())


def test_any_optimizer_is_accepted() -> None:
    model = network()
    model, private = run(model, optimizer=torch.optim.Adam(model.parameters(), 0.1))
    train(model, private, 3)
    assert max(norms(model, "spectral")) <= C and data()[0][0].shape == (FEATURES,)
    assert clipwise.Lipschitz is Lipschitz and sgd(model)


@pytest.mark.parametrize("argument", ["fixed", "tight", "balanced"])
def test_switches_are_true_or_false(argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument} must be True or False"):
        Lipschitz(C, X, **{argument: 1e300})


def test_fixed_bounds_refuse_a_layer_that_is_frozen_in_part() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"fixed=True.*'1' is partly frozen"):
        run(model, strategy={"fixed": True})
    run(model)  # bounds from the current weights have no such limit


class Scaled(nn.Module):
    """Reads a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(FEATURES))
        self.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@pytest.mark.parametrize("fixed", [False, True])
def test_buffers_are_measured_again_after_a_change(fixed: bool) -> None:
    model, private = run(network(Scaled(), nn.Linear(FEATURES, CLASSES)), strategy={"fixed": fixed})
    train(model, private, 1)
    before = private.parts()[0].sensitivity
    with torch.no_grad():
        model[1].scale.mul_(1000)  # type: ignore[index,operator,union-attr]
    private.declare_update("public", "another scale")
    next(iter(private.loader))
    assert private.parts()[0].sensitivity == pytest.approx(1000 * before, rel=1e-3)


def test_a_step_refuses_a_model_that_is_no_longer_what_was_traced() -> None:
    model, private = run(network(Scaled(), nn.Linear(FEATURES, CLASSES)))
    train(model, private, 1)
    model[1].shift = 1000.0  # type: ignore[index,assignment,union-attr]
    with pytest.raises(StepError, match=r"1000\.0"):
        train(model, private, 1)
    model[1].shift = 0.0  # type: ignore[index,assignment,union-attr]
    train(model, private, 1)
    model[1].scale = 1000 * model[1].scale  # type: ignore[index,assignment,operator,union-attr]
    with pytest.raises((StepError, UnsupportedModelError), match="scale"):
        train(model, private, 1)


def test_a_loss_must_not_depend_on_the_targets_of_others() -> None:
    model, private = run()
    x, y = next(iter(private.loader))
    outputs = model(x)
    losses = (outputs.sum(1, keepdim=True) - y).abs().sum(1)
    with pytest.raises(CoupledExamplesError, match="pair of examples"):
        private.step(losses, outputs=outputs)


def test_inputs_of_another_shape_than_the_traced_one_are_refused() -> None:
    model = network(nn.Unflatten(1, (1, -1)), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(1, CLASSES))
    model, private = run(model, strategy={"input_shape": (100 * FEATURES,)})
    with pytest.raises(UnsupportedModelError, match="shape"):
        train(model, private, 1)


@pytest.mark.parametrize(("first", "then"), [("float", "bfloat16"), ("double", "float")])
def test_weights_in_a_coarser_type_are_refused(first: str, then: str) -> None:
    """Their sums are rounded by more than the bounds allow for."""
    model, private = run(getattr(network(), first)(), dataset=data(dtype=torch.float64), sampling="full")
    getattr(model, then)()
    x, y = next(iter(private.loader))
    outputs = model(x.to(next(model.parameters()).dtype))
    losses = F.cross_entropy(outputs.float(), y, reduction="none")
    with pytest.raises((StepError, UnsupportedModelError), match=r"half precision|a coarser type"):
        private.step(losses, outputs=outputs)
