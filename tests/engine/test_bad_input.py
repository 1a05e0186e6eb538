"""Whatever cannot be made private is refused by name, with a remedy, and nothing is released or changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import clipwise
from clipwise import Batch, FileLedger, PerExample, Private, make_private
from clipwise.errors import (
    ConfigurationError,
    CoupledExamplesError,
    LedgerError,
    PrivacyWarning,
    StepError,
    UnsupportedModelError,
)
from clipwise.layers import clip_inputs
from clipwise.ledger import ledger
from tests.runs import (
    CLASSES,
    FEATURES,
    SIZE,
    data,
    gradients,
    losses_of,
    network,
    parameters,
    private_run,
    same,
    sgd,
    train,
)


@contextmanager
def refused(kind: type[Exception], *words: str, model: nn.Module, private: Private) -> Iterator[None]:
    """The error has this class and says these words; parameters, gradients and ledger stay as they were."""
    before, position, history = (parameters(model), private._context.ledger.position, private._context.ledger.history())
    with pytest.raises(kind) as error:
        yield
    for word in words:
        assert word in str(error.value), str(error.value)
    assert same(before, parameters(model)), "a parameter was changed"
    assert (private._context.ledger.position, private._context.ledger.history()) == (position, history)


# Losses


BAD_LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a mean": (lambda losses: losses.mean(), ("losses", "single number", "reduction='none'")),
    "two dimensions": (lambda losses: losses[:, None], ("losses", "2 dimensions", ".sum(1)")),
    "one left out": (lambda losses: losses[1:], ("losses", "one entry for each example")),
    "one repeated": (lambda losses: torch.cat([losses, losses[:1]]), ("losses", "Do not drop, repeat")),
    "pooled": (lambda losses: losses.mean()[None], ("losses", "one entry for each example")),
    "detached": (lambda losses: losses.detach(), ("losses", "no gradient", "no_grad")),
    "whole numbers": (lambda losses: losses.long(), ("losses", "torch.int64", "floating point")),
    "a list": (lambda losses: list(losses), ("losses", "tensor", "list")),
    "a number": (lambda losses: 1.0, ("losses", "tensor", "float")),
    "nothing": (lambda losses: None, ("losses is None", "not empty")),
}


@pytest.mark.parametrize("what", BAD_LOSSES)
@pytest.mark.parametrize("physical", [None, 3])
def test_losses_that_are_not_one_an_example(what: str, physical: int | None) -> None:
    spoil, words = BAD_LOSSES[what]
    model, private = private_run(sampling="fixed-size", max_physical_batch_size=physical)
    train(model, private, 1)
    batch = next(iter(private.loader.pieces()))
    losses = losses_of(model, batch)
    with refused(StepError, *words, model=model, private=private):
        private.step(spoil(losses))
    private.step(losses)  # the right ones are still welcome


COUPLED: dict[str, Any] = {
    "minus the mean": lambda losses: losses - losses.mean(),
    "over the sum": lambda losses: losses / losses.sum(),
    "softmax weights": lambda losses: losses * losses.softmax(0),
    "in another order": lambda losses: losses.flip(0),
    "ranked": lambda losses: losses.sort().values,
    "compared": lambda losses: F.relu(losses[:, None] - losses[None]).sum(1),
}


@pytest.mark.parametrize("what", COUPLED)
def test_a_coupled_loss(what: str) -> None:
    model, private = private_run(sampling="fixed-size")
    for _ in range(5):  # every further attempt is refused
        batch = next(iter(private.loader))
        losses = COUPLED[what](losses_of(model, batch))
        for _ in range(2):
            with refused(CoupledExamplesError, "example", model=model, private=private):
                private.step(losses)


class MinusBatchMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class MemorisesBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("layer", [MinusBatchMean, MemorisesBatch])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_coupled_model(layer: type[nn.Module], place: str) -> None:
    layers = [nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)]
    layers.insert({"first": 0, "middle": 1, "last": 3}[place], layer())
    model, private = private_run(nn.Sequential(*layers), sampling="fixed-size")
    for _ in range(4):
        with refused(CoupledExamplesError, "example", model=model, private=private):
            train(model, private, 1)


def test_the_message_for_a_coupled_loss_names_where_to_look() -> None:
    model, private = private_run(sampling="fixed-size")
    batch = next(iter(private.loader))
    with pytest.raises(CoupledExamplesError, match=r"mean over the batch.*clipwise\.check"):
        losses = losses_of(model, batch)
        private.step(losses - losses.mean())


# Models


def with_batch_norm(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, CLASSES))


def test_batch_norm_in_training_mode() -> None:
    model = with_batch_norm()
    with pytest.raises(UnsupportedModelError, match=r"Layer '1' \(BatchNorm1d\).*GroupNorm.*\.eval\(\)"):
        private_run(model)
    model.eval()
    _, private = private_run(model)
    train(model, private, 2)
    before = {name: b.clone() for name, b in model.named_buffers()}
    train(model, private, 1)
    assert same(before, dict(model.named_buffers()))


def test_batch_norm_without_statistics_mixes_examples_in_every_mode() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Layer '1' \(BatchNorm1d\).*even in \.eval\(\).*GroupNorm"):
        private_run(with_batch_norm(track_running_stats=False).eval())


def test_batch_norm_switched_to_training_later() -> None:
    model = with_batch_norm().eval()
    _, private = private_run(model)
    train(model, private, 1)
    model.train()
    with refused(
        UnsupportedModelError, "Layer '1' (BatchNorm1d)", "reset_running_stats()", model=model, private=private
    ):
        train(model, private, 1)


def test_instance_norm_that_keeps_statistics() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())
    model.append(nn.Linear(FEATURES, CLASSES))
    with pytest.raises(UnsupportedModelError, match=r"Layer '1' \(InstanceNorm1d\).*track_running_stats=False"):
        private_run(model)


class Learns(nn.Module):
    """Stores a mean of its inputs, in one of the ways that occur in practice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", None if how == "first batch" else torch.zeros(FEATURES))
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.center = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.detach().mean(0) if len(x) else torch.zeros(FEATURES)
            if self.how == "in place":
                self.mean.lerp_(mean, 0.1)
            elif self.how == "replaced":
                self.mean = 0.9 * self.mean + 0.1 * mean
            elif self.how == "first batch" and self.mean is None:
                self.mean = mean
            elif self.how == "parameter":
                self.scale.copy_(1 + mean)
            elif self.how == "frozen parameter":
                self.center.lerp_(mean, 0.1)
        return x * self.scale


@pytest.mark.parametrize("how", ["in place", "replaced", "first batch", "parameter", "frozen parameter"])
def test_a_model_that_learns_in_the_forward_pass(how: str) -> None:
    model = nn.Sequential(Learns(how), nn.Linear(FEATURES, CLASSES))
    _, private = private_run(model, probe_independence=False)
    name = {"parameter": "0.scale", "frozen parameter": "0.center"}.get(how, "0.mean")
    batch = next(iter(private.loader))
    losses = losses_of(model, batch)
    with refused(UnsupportedModelError, repr(name), "forward pass", "public data", model=model, private=private):
        private.step(losses)


class PartlyUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_parameter_that_takes_no_part() -> None:
    model, private = private_run(PartlyUnused(), sampling="fixed-size")
    with refused(UnsupportedModelError, "'spare.weight'", "requires_grad_(False)", model=model, private=private):
        train(model, private, 1)
    assert not gradients(model)
    model.spare.requires_grad_(False)
    model, private = private_run(model, sampling="fixed-size")
    train(model, private, 1)


# Gradients of other code


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_plain_backward_before_the_private_one(steps: int, zero_grad: bool) -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, steps)
    if zero_grad:
        private.optimizer.zero_grad()
    losses = losses_of(model, next(iter(private.loader)))
    losses.sum().backward(retain_graph=True)
    with refused(StepError, "'0.weight'", "backward()", "zero_grad()", model=model, private=private):
        private.step(losses)
    private.optimizer.zero_grad()
    private.step(losses)


def test_what_an_earlier_run_left_in_grad_is_dropped() -> None:
    model, first = private_run()
    train(model, first, 1)
    first.close()
    assert model[0].weight.grad is not None  # type: ignore[index, union-attr]
    _, second = private_run(model)
    batch = next(iter(second.loader))
    losses_of(model, batch).sum().backward()  # adds to it
    with refused(StepError, "'0.weight' has a gradient", model=model, private=second):
        second.step(losses_of(model, batch))
    _, third = private_run(model, seed=3)
    plain = network()
    plain.load_state_dict(model.state_dict())
    _, fresh = private_run(plain, seed=3)
    train(model, third, 1)
    train(plain, fresh, 1)
    assert same(parameters(model), parameters(plain))


def test_a_gradient_that_was_changed_after_the_update() -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    next(model.parameters()).grad.add_(1)  # type: ignore[union-attr]
    with refused(StepError, "'0.weight'", "zero_grad()", model=model, private=private):
        train(model, private, 1)


# Optimizers


def test_an_optimizer_with_foreign_parameters() -> None:
    model, other = network(), network()
    both = torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"optimizer holds a parameter .*group 1.*build the optimizer from"):
        private_run(model, both)


def test_several_optimizers() -> None:
    model = network()
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with pytest.raises(ConfigurationError, match=r"one torch.optim.Optimizer, not list.*groups of one optimizer"):
        private_run(model, both)  # type: ignore[arg-type]


def test_an_optimizer_that_needs_several_gradients_of_a_batch() -> None:
    model = network()
    with pytest.raises(ConfigurationError, match=r"LBFGS.*use SGD, Adam"):
        private_run(model, torch.optim.LBFGS(model.parameters()))


def test_a_trainable_parameter_that_the_optimizer_lacks() -> None:
    model = network()
    with pytest.raises(ConfigurationError, match=r"'2.weight'.*requires_grad_\(False\)"):
        private_run(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    model[2].requires_grad_(False)
    _, private = private_run(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    train(model, private, 1)


@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_requires_grad_changed_later(name: str) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    _, private = private_run(model, sampling="fixed-size")
    train(model, private, 1)
    p = model.get_parameter(name)
    p.requires_grad_(not p.requires_grad)
    with refused(StepError, repr(name), "requires_grad", "make a new private run", model=model, private=private):
        train(model, private, 1)


def test_a_layer_that_comes_later() -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    model.append(nn.Linear(CLASSES, CLASSES))  # type: ignore[operator]
    with refused(StepError, "'3.weight' was added", "make a new private run", model=model, private=private):
        train(model, private, 1)
    model, private = private_run()
    clip_inputs(model, input_norm=1.0)
    with refused(StepError, "'0.layer.weight' was added", "clip", model=model, private=private):
        train(model, private, 1)


def test_a_layer_replaced_later() -> None:
    model, private = private_run(sampling="fixed-size")
    train(model, private, 1)
    model[2] = nn.Linear(4, CLASSES)
    with refused(StepError, "'2.weight'", "make a new private run", model=model, private=private):
        train(model, private, 1)


# Arguments


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1)])


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no length": ({"dataset": Endless()}, ("dataset", "__len__")),
    "a generator": ({"dataset": (i for i in range(3))}, ("dataset", "__len__")),
    "no records": ({"dataset": TensorDataset(torch.zeros(0, FEATURES))}, ("dataset", "at least 1")),
    "rate 0": ({"sample_rate": 0.0}, ("sample_rate", "greater than 0 and at most 1")),
    "rate above 1": ({"sample_rate": 1.5}, ("sample_rate", "greater than 0 and at most 1")),
    "rate NaN": ({"sample_rate": math.nan}, ("sample_rate", "greater than 0 and at most 1")),
    "batch larger than the data": ({"batch_size": 41}, ("batch_size", "larger than the data set")),
    "batch of nothing": ({"batch_size": 0}, ("batch_size", "at least 1")),
    "half a record": ({"batch_size": 2.5}, ("batch_size", "whole number")),
    "batch and rate": ({"batch_size": 8, "sample_rate": 0.2}, ("batch_size", "sample_rate", "exactly one")),
    "neither batch nor rate": ({"batch_size": None}, ("batch_size", "sample_rate", "exactly one")),
    "rate of shuffled": ({"sampling": "shuffled", "sample_rate": 0.2}, ("sample_rate", "batch_size")),
    "batch of full": ({"sampling": "full", "batch_size": 8}, ("sampling='full'", "batch_size")),
    "noise below 0": ({"noise_multiplier": -1.0}, ("noise_multiplier", "at least 0")),
    "noise NaN": ({"noise_multiplier": math.nan}, ("noise_multiplier", "at least 0")),
    "noise infinite": ({"noise_multiplier": math.inf}, ("noise_multiplier", "at least 0")),
    "noise in words": ({"noise_multiplier": "much"}, ("noise_multiplier", "at least 0")),
    "delta 0": ({"delta": 0.0}, ("delta", "less than 1")),
    "delta 1": ({"delta": 1.0}, ("delta", "less than 1")),
    "delta NaN": ({"delta": math.nan}, ("delta", "less than 1")),
    "epsilon without delta": ({"epsilon": 1.0, "epochs": 1}, ("epsilon", "delta")),
    "epsilon without a plan": ({"epsilon": 1.0, "delta": 1e-5}, ("epsilon", "epochs or steps")),
    "epsilon 0": ({"epsilon": 0.0, "delta": 1e-5, "epochs": 1}, ("epsilon", "greater than 0")),
    "epsilon NaN": ({"epsilon": math.nan, "delta": 1e-5, "epochs": 1}, ("epsilon", "greater than 0")),
    "epsilon infinite": ({"epsilon": math.inf, "delta": 1e-5, "epochs": 1}, ("epsilon", "greater than 0")),
    "epsilon and noise": (
        {"epsilon": 1.0, "delta": 1e-5, "epochs": 1, "noise_multiplier": 1.0},
        ("epsilon", "noise_multiplier", "not both"),
    ),
    "neither epsilon nor noise": ({"noise_multiplier": None}, ("epsilon", "noise_multiplier")),
    "epochs and steps": ({"epochs": 1, "steps": 5}, ("epochs", "steps", "not both")),
    "no epochs": ({"epochs": 0}, ("epochs", "greater than 0")),
    "epochs NaN": ({"epochs": math.nan}, ("epochs", "greater than 0")),
    "half a step": ({"steps": 2.5}, ("steps", "whole number")),
    "no steps": ({"steps": 0}, ("steps", "at least 1")),
    "unknown sampling": ({"sampling": "bernoulli"}, ("sampling='bernoulli'", "'poisson'", "'shuffled'")),
    "unknown adjacency": ({"adjacency": "neighbours"}, ("adjacency='neighbours'", "'zero-out'", "'replace-one'")),
    "a secret size": ({"adjacency": "add-remove"}, ("adjacency='add-remove'", "size", "'zero-out'")),
    "a limit for the wrong scheme": ({"max_batch_size": 20}, ("max_batch_size", "'truncated-poisson'")),
    "a limit below the mean": (
        {"sampling": "truncated-poisson", "max_batch_size": 7},
        ("max_batch_size=7", "expected batch size 8"),
    ),
    "unknown noise": ({"noise": "laplace"}, ("noise='laplace'", "'standard'")),
    "poisson and replace-one": (
        {"adjacency": "replace-one"},
        ("adjacency='replace-one'", "sampling='poisson'", "'zero-out'"),
    ),
    "fixed size and zero-out": (
        {"sampling": "fixed-size", "adjacency": "zero-out"},
        ("adjacency='zero-out'", "sampling='fixed-size'", "'replace-one'"),
    ),
    "no strategy": ({"clipping": 1.0}, ("clipping", "PerExample")),
    "physical batch 0": ({"max_physical_batch_size": 0}, ("max_physical_batch_size", "at least 1")),
    "workers below 0": ({"num_workers": -1}, ("num_workers", "at least 0")),
    "prefetching without workers": ({"prefetch_factor": 2}, ("prefetch_factor", "num_workers")),
    "seed in words": ({"seed": "lucky"}, ("seed", "whole number")),
    "unknown parts": ({"clipping": PerExample(1.0, parts="head")}, ("parts='head'", "'layer'")),
    "a part that is not there": ({"clipping": PerExample(1.0, parts=[["0"], ["9"]])}, ("parts", "'9'")),
    "a parameter in no part": ({"clipping": PerExample(1.0, parts=[["0"]])}, ("'2.weight'", "exactly one")),
    "a parameter in two parts": (
        {"clipping": PerExample(1.0, parts=[["0", "2"], ["2.bias"]])},
        ("'2.bias'", "exactly one"),
    ),
    "norms of other parts": ({"clipping": PerExample({"0": 1.0, "1": 1.0}, parts="layer")}, ("max_norm", "'0', '2'")),
    "no module": ({"model": lambda x: x}, ("model", "torch.nn.Module")),
    "no optimizer": ({"optimizer": 0.1}, ("optimizer", "torch.optim.Optimizer")),
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_arguments_that_make_no_sense(what: str, tmp_path: Path) -> None:
    options, words = BAD_ARGUMENTS[what]
    good: dict[str, Any] = {"batch_size": 8, "noise_multiplier": 1.0, "ledger": tmp_path / "run.ledger"}
    if ("sample_rate" in options and "batch_size" not in options) or options.get("sampling") == "full":
        del good["batch_size"]
    if "epsilon" in options:
        del good["noise_multiplier"]
    bad = {**good, **options}
    model = bad.pop("model", network())
    optimizer = bad.pop("optimizer", None) or sgd(model if isinstance(model, nn.Module) else network())
    before = parameters(model) if isinstance(model, nn.Module) else {}
    with pytest.raises(ConfigurationError) as error:
        make_private(model, optimizer, bad.pop("dataset", data()), **bad)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert not before or same(before, parameters(model))
    # After the argument is corrected, the same ledger can be used: nothing was released.
    _, private = private_run(ledger=tmp_path / "run.ledger")
    next(iter(private.loader))
    private.close()
    assert ledger.read(tmp_path / "run.ledger").position == 0


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, "one", {"0": 1.0, "2": -1.0}])
def test_a_bound_that_bounds_nothing(norm: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_norm must be a finite number that is at least"):
        PerExample(norm)


@pytest.mark.parametrize("argument", ["mode", "method", "split"])
def test_unknown_words_of_the_strategy(argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}='best' is not known: use one of '"):
        PerExample(1.0, **{argument: "best"})  # type: ignore[arg-type]


def test_a_model_without_anything_to_train() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        make_private(model, sgd(model), data(), batch_size=8, noise_multiplier=1.0)


def test_a_delta_that_lets_a_record_be_published_is_warned_of() -> None:
    with pytest.warns(PrivacyWarning, match="1/N") as caught:
        private_run(delta=1 / 40)
    assert caught[0].filename == private_run.__code__.co_filename
    _, private = private_run()
    assert private._context.plan.delta < 1 / 40


def test_no_message_holds_a_data_value() -> None:
    """A refusal is an output too."""
    dataset = data()
    dataset.tensors[0].fill_(7.123456)
    for spoil, _ in [*BAD_LOSSES.values(), *((f, ()) for f in COUPLED.values())]:
        model, private = private_run(dataset=dataset, sampling="fixed-size")
        losses = losses_of(model, next(iter(private.loader)))
        with pytest.raises(clipwise.ClipwiseError) as error:
            private.step(spoil(losses))
        for value in ("7.12", *(f"{x:.4g}"[:5] for x in losses.tolist())):
            assert value not in str(error.value)


# Ledgers of other runs


def test_paths_where_nothing_can_be_written(tmp_path: Path) -> None:
    """At once, and not after the training."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path):
        with pytest.raises(ConfigurationError, match=r"resume_file: .* cannot be written .*: give another path"):
            private_run(resume_file=path)
        with pytest.raises(LedgerError, match="as a ledger"):
            private_run(ledger=path)
    private_run(resume_file=tmp_path / "new" / "resume")[1].close()
    assert list((tmp_path / "new").iterdir()) == []


def test_columns_that_are_no_data_set() -> None:
    with pytest.raises(ConfigurationError, match=r"tuple of 2 entries.*TensorDataset\(x, y\)"):
        private_run(dataset=data().tensors)


def test_a_limit_that_would_cut_users() -> None:
    with pytest.raises(ConfigurationError, match=r"leave it out\. With group= the records of each user"):
        private_run(
            group=[k // 4 for k in range(SIZE)], batch_size=5, clipping=Batch(max_norm=1.0), max_physical_batch_size=2
        )


def test_the_ledger_of_another_model_or_of_other_data(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    model, private = private_run(ledger=path)
    train(model, private, 2)
    private.close()
    written = path.read_bytes()
    with pytest.raises(LedgerError, match=r"another run.*dataset_size.*another file"):
        private_run(dataset=data(39), ledger=path)
    with pytest.raises(LedgerError, match=r"another run.*parameters.*another file"):
        private_run(nn.Linear(FEATURES, CLASSES), ledger=path)
    assert path.read_bytes() == written


def test_a_ledger_whose_run_was_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    model, private = private_run(ledger=path)
    train(model, private, 2)
    private.close()
    model, private = private_run(ledger=path)
    words = (str(path), "2 releases", "load_state_dict", "a new ledger path", "join=True")
    with refused(LedgerError, *words, model=model, private=private):
        next(iter(private.loader))
    with refused(StepError, "batch", model=model, private=private):
        private.step(torch.ones(8, requires_grad=True))
    private.close()
    assert ledger.read(path).position == 2


def test_a_run_may_join_the_ledger_of_another(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    model, private = private_run(ledger=path)
    train(model, private, 2)
    private.close()
    model, private = private_run(dataset=data(39), sample_rate=0.2, ledger=FileLedger(path, join=True))
    train(model, private, 3)
    private.close()
    assert [entry.count for entry in ledger.read(path).history] == [2, 3]


def test_a_ledger_in_use(tmp_path: Path) -> None:
    model, private = private_run(ledger=tmp_path / "run.ledger")
    with pytest.raises(LedgerError, match="in use"):
        private_run(ledger=tmp_path / "run.ledger")
    train(model, private, 1)


def test_a_ledger_that_is_closed() -> None:
    open_ledger = clipwise.MemoryLedger()
    model, private = private_run(ledger=open_ledger)
    train(model, private, 1)
    private.close()
    with pytest.raises(LedgerError, match="closed"):
        private_run(ledger=open_ledger)


# The order of the loop


def test_a_step_without_a_batch() -> None:
    model, private = private_run()
    with refused(StepError, "without a new batch", "private.loader", model=model, private=private):
        private.step(losses_of(model, data()[:8]))


def test_two_steps_on_one_batch() -> None:
    model, private = private_run(sampling="fixed-size")
    batch = next(iter(private.loader))
    private.step(losses_of(model, batch))
    with refused(StepError, "once for each batch", model=model, private=private):
        private.step(losses_of(model, batch))


def test_a_batch_that_is_skipped() -> None:
    model, private = private_run(sampling="fixed-size")
    iterator = iter(private.loader)
    next(iterator)
    with refused(StepError, "skipped", "in place of loss.backward()", model=model, private=private):
        next(iterator)


def test_a_batch_of_an_older_iterator() -> None:
    model, private = private_run(sampling="fixed-size")
    older = iter(private.loader)
    next(older)
    next(iter(private.loader))
    with refused(StepError, "newer", model=model, private=private):
        next(older)
