"""Private runs that clip microbatches: the loop, users, local updates, batch norm, stop and resume."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Batch, PerExample, Private, Unit, check, layers
from clipwise.clipping import Strategy
from clipwise.engine import checkpoint, resume
from clipwise.errors import (
    BudgetExhausted,
    ConfigurationError,
    CoupledExamplesError,
    PrivacyWarning,
    StepError,
    UnsupportedModelError,
)
from clipwise.gradients import METHODS as PER_EXAMPLE_METHODS
from clipwise.noise.key import NoiseKey
from clipwise.report import statement
from tests.runs import (
    CLASSES,
    FEATURES,
    HIDDEN,
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

USERS = [i % 7 for i in range(SIZE)]


def normalized(keep: bool = False) -> nn.Sequential:
    """A network with batch norm; with its running statistics if `keep`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    return model if keep else layers.without_running_statistics(model)  # type: ignore[return-value]


def fix_draws(private: Private) -> Private:
    private._context.keys.key = NoiseKey.from_seed(5, b"the same draws")
    return private


def released(model: nn.Module, private: Private) -> dict[str, Tensor]:
    """The gradient of the next step."""
    for batch in private.loader.pieces():
        if private.backward(losses_of(model, batch)):
            break
    return gradients(model)


# The loop


def test_one_clipped_mean_by_hand() -> None:
    C = 0.05
    model, private = private_run(clipping=Batch(C), sampling="full", noise_multiplier=0)
    x, y = data().tensors
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    length = math.hypot(*(float(g.norm()) for g in expected))
    assert length > C
    for found, g in zip(released(model, private).values(), expected, strict=True):
        torch.testing.assert_close(found, g * C / length, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("sampling", ["poisson", "full", "shuffled"])
def test_microbatches_of_one_are_per_example_clipping(sampling: str) -> None:
    found = []
    for clipping in (PerExample(0.3, "layer"), Batch(0.3, SIZE, "layer")):
        model, private = private_run(clipping=clipping, sampling=sampling, noise_multiplier=0)
        assert [p.sensitivity for p in private.parts()] == pytest.approx([0.3 / math.sqrt(2)] * 2)
        found.append(released(model, fix_draws(private)))
    for name, g in found[0].items():
        torch.testing.assert_close(g, found[1][name], rtol=1e-5, atol=1e-8)


def test_a_step_has_k_pieces_and_one_release() -> None:
    model, private = private_run(clipping=Batch(1.0, microbatches=4))
    done = [private.step(losses_of(model, batch)) for batch in private.loader.pieces()]
    assert done == [False, False, False, True] * 5
    assert private.steps == 5 and len(private.loader) == 5


def test_the_sum_over_microbatches_by_hand() -> None:
    """Record i is in microbatch i mod k, in every draw."""
    k, C = 3, 0.1
    model, private = private_run(clipping=Batch(C, k), sampling="full", noise_multiplier=0)
    x, y = data().tensors
    total = [torch.zeros_like(p) for p in model.parameters()]
    for j in range(k):
        g = torch.autograd.grad(F.cross_entropy(model(x[j::k]), y[j::k]), list(model.parameters()))
        length = math.hypot(*(float(v.norm()) for v in g))
        total = [t + v * min(1, C / length) for t, v in zip(total, g, strict=True)]
    for found, t in zip(released(model, private).values(), total, strict=True):
        torch.testing.assert_close(found, t / k, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("k", "group"), [(1, None), (4, None), (1, USERS)])
def test_the_noise_has_the_stated_size(k: int, group: list[int] | None) -> None:
    """z S / k on each coordinate; S is 2 C for a record and C for a user."""
    model = nn.Linear(200, 100)
    rows = TensorDataset(torch.zeros(SIZE, 200), torch.zeros(SIZE, dtype=torch.long))
    clipping = Batch(0.5, k)
    _, private = private_run(
        model, dataset=rows, clipping=clipping, group=group, noise_multiplier=2.0, seed=1, batch_size=4
    )
    noise = torch.cat([g.flatten() for g in released(model, private).values()])
    expected = 2.0 * (0.5 / 4 if group else 2 * 0.5 / k)
    assert float(noise.std()) == pytest.approx(expected, rel=0.03)


def test_a_single_number_will_do() -> None:
    found = []
    for reduce in (lambda v: v, lambda v: v.mean()):
        model, private = private_run(clipping=Batch(1.0, microbatches=4), seed=3)
        for batch in private.loader.pieces():
            private.step(reduce(losses_of(model, batch)))
        found.append(parameters(model))
    assert same(*found)
    model, private = private_run()
    for batch in private.loader.pieces():
        with pytest.raises(StepError, match="single number"):
            private.step(losses_of(model, batch).mean())
        break


def test_losses_must_still_be_of_the_batch() -> None:
    model, private = private_run(clipping=Batch())
    for batch in private.loader:
        with pytest.raises(StepError, match="one entry for each example"):
            private.step(losses_of(model, batch).repeat(2))
        with pytest.raises(StepError, match="2 dimensions"):
            private.step(losses_of(model, batch)[:, None])
        with pytest.raises(StepError, match="no gradient"):
            private.step(losses_of(model, batch).mean().detach())
        break


def test_empty_batches_release_noise() -> None:
    for k in (1, 3):
        model, private = private_run(clipping=Batch(1.0, k), sample_rate=1e-9, seed=2)
        sizes = []
        for batch in private.loader.pieces():
            sizes.append(len(batch[0]))
            if private.step(losses_of(model, batch).mean()):  # the mean of nothing is NaN
                break
        assert sizes == [0] * k and private.steps == 1
        assert all(bool(g.any()) and bool(g.isfinite().all()) for g in gradients(model).values())


@pytest.mark.parametrize("nothing", [torch.tensor(0.0), torch.tensor(0), torch.zeros(0)], ids=repr)
def test_of_an_empty_microbatch_any_loss_will_do(nothing: Tensor) -> None:
    model, private = private_run(clipping=Batch(), batch_size=1)
    empty = 0
    for _, batch in zip(range(20), private.loader, strict=False):
        empty += not len(batch[0])
        private.step(losses_of(model, batch) if len(batch[0]) else nothing)
    assert empty


class Experts(nn.Module):
    """The first feature of a row selects its expert, so a microbatch may not use one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        to_first = x[:, 0] > 0
        out = x.new_zeros(len(x), CLASSES)
        for expert, rows in zip(self.experts, (to_first, ~to_first), strict=True):
            if rows.any():
                out[rows] = expert(x[rows])
        return out


METHODS = [PerExample(0.1, parts, method=m) for m in PER_EXAMPLE_METHODS for parts in ("all", "layer")]


@pytest.mark.parametrize("clipping", [Batch(0.1), *METHODS], ids=lambda s: getattr(s, "method", "batch"))
def test_a_parameter_that_was_reached_before_may_be_left_out(clipping: Strategy) -> None:
    """Whether a batch reaches it depends on private rows, which may not stop a run."""
    model, private = private_run(Experts(), clipping=clipping, sampling="full", noise_multiplier=0.0)
    for number, (x, y) in zip(range(2), iter_epochs(private), strict=False):
        x = x.detach().clone()
        if number:
            x[:, 0] = x[:, 0].abs() + 1
        alone = copy.deepcopy(model.experts[0])
        private.step(F.cross_entropy(model(x), y, reduction="none"))
    first, second = (expert.weight.grad for expert in model.experts)
    assert first is not None and second is not None
    assert bool(first.any()) and not bool(second.any())

    bound = private.parts()[0].sensitivity / (1 if isinstance(clipping, PerExample) else 2)
    same_clip = dataclasses.replace(clipping, max_norm=bound, parts="all")
    _, other = private_run(alone, clipping=same_clip, sampling="full", noise_multiplier=0.0)
    next(iter(other.loader))
    other.backward(F.cross_entropy(alone(x), y, reduction="none"))
    torch.testing.assert_close(first, alone.weight.grad)  # as of a model that is this expert alone


@pytest.mark.parametrize("clipping", [Batch(), PerExample()], ids=["batch", "per example"])
def test_a_parameter_without_a_gradient_is_refused(clipping: Strategy) -> None:
    model, private = private_run(Experts(), clipping=clipping, sampling="full")
    x, y = next(iter(private.loader))
    with pytest.raises(UnsupportedModelError, match=r"do not depend .*experts\.1\.weight|experts\.1\.weight.* no part"):
        private.step(F.cross_entropy(model(x.detach().abs() + 1), y, reduction="none"))


def iter_epochs(private: Private) -> Iterator[Any]:
    while True:
        yield from private.loader


def test_pieces_of_a_microbatch_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"max_physical_batch_size.*microbatches=k"):
        private_run(clipping=Batch(), max_physical_batch_size=4, batch_size=8)
    with pytest.raises(ConfigurationError, match="max_physical_batch_size"):
        private_run(clipping=Batch(1.0, 2), max_physical_batch_size=0, batch_size=8)
    with pytest.raises(ConfigurationError, match="max_physical_batch_size"):
        private_run(clipping=Batch(), group=USERS, batch_size=3, max_physical_batch_size=2)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "partition", "full"])
def test_a_limit_that_microbatches_keep_anyway_changes_nothing(sampling: str) -> None:
    whole = {} if sampling == "full" else {"batch_size": 8}
    found = []
    for limit in (None, SIZE // 4 if sampling == "full" else 2):
        options = whole | {"sampling": sampling, "seed": 3, "max_physical_batch_size": limit}
        model, private = private_run(clipping=Batch(1.0, 4), **options)
        train(model, private, 3)
        found.append(parameters(model))
    assert same(*found)


def test_microbatches_must_fit_draws_of_constant_size() -> None:
    for sampling in ("partition", "fixed-size"):
        with pytest.raises(ConfigurationError, match="microbatches=3 must divide batch_size=8"):
            private_run(clipping=Batch(1.0, 3), sampling=sampling)
        _, private = private_run(clipping=Batch(1.0, 4), sampling=sampling)
        assert private._context.event.sample_rate == 0.2


def test_a_compiled_step_is_an_ordinary_one() -> None:
    found = []
    for is_compiled in (False, True):
        model, private = private_run(clipping=Batch(1.0, microbatches=2), seed=4)
        loss = lambda x, y, on=model: F.cross_entropy(on(x), y)  # noqa: E731
        step = private.compiled(loss) if is_compiled else None
        for _ in range(2):
            for batch in private.loader.pieces():
                step(*batch) if step else private.step(loss(*batch))
        found.append(parameters(model))
    assert same(*found)


def test_a_budget_is_kept() -> None:
    model, private = private_run(clipping=Batch(1.0, 2), epsilon=2.0, delta=1e-5, epochs=1)
    train(model, private, 5)
    assert private.spent().epsilon <= 2.0
    with pytest.raises(BudgetExhausted):
        train(model, private, 20)


def test_workers_fetch_the_same_microbatches() -> None:
    found = []
    for workers in (0, 1):
        model, private = private_run(clipping=Batch(1.0, 3), seed=4, num_workers=workers)
        train(model, private, 3)
        found.append(parameters(model))
    assert same(*found)


# Coupled models


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    return (z - z.mean(0)).square().sum(1) if len(z) else z.sum(1)


def test_coupled_losses_are_for_batch_only() -> None:
    model, private = private_run(sampling="full")
    losses = contrastive(model, next(iter(private.loader.pieces())))
    with pytest.raises(CoupledExamplesError, match=r"Batch\(max_norm=.*far more noise"):
        private.step(losses)
    model, private = private_run(clipping=Batch(1.0, 2), sampling="full")
    for batch in private.loader.pieces():
        private.step(contrastive(model, batch))
    assert private.steps == 1


def test_running_statistics_are_refused_before_the_first_step() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Layer '1' \(BatchNorm1d\).*without_running_statistics"):
        private_run(normalized(keep=True), clipping=Batch())
    with pytest.raises(UnsupportedModelError, match=r"Layer '1'.*Batch\(max_norm=.*far more noise"):
        private_run(normalized(keep=True))
    tracked = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True))
    with pytest.raises(UnsupportedModelError, match="InstanceNorm1d"):
        private_run(nn.Sequential(tracked, nn.Flatten(), nn.Linear(5, 3)), clipping=Batch())


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_fail_on_one_record_are_refused_before_the_first_step(training: bool) -> None:
    """torch's error would occur in the middle of a run, and would reveal the realised batch size."""
    plain = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, track_running_stats=False)).train(training)
    with pytest.raises(UnsupportedModelError, match=r"Layer '1'.*one record.*without_running_statistics"):
        private_run(plain, clipping=Batch())
    private_run(layers.without_running_statistics(plain), clipping=Batch())


def test_without_them_batch_norm_trains_and_nothing_is_kept() -> None:
    model, private = private_run(normalized(), clipping=Batch(1.0, 2), noise_multiplier=0.1)
    before = {name: b.clone() for name, b in model.named_buffers()}
    train(model, private, 12)
    assert same(before, dict(model.named_buffers()))
    with pytest.raises(UnsupportedModelError, match=r"Layer '1'.*training mode"):
        private_run(normalized())
    with pytest.raises(UnsupportedModelError, match=r"Layer '1'.*even in .eval"):
        private_run(normalized().eval())
    public = layers.recompute_statistics(normalized(), [torch.randn(20, FEATURES)])
    private_run(public)  # constants from public data


def test_frozen_and_stateless_batch_norm_is_accepted() -> None:
    for model in (normalized(keep=True).eval(), normalized()):
        model, private = private_run(model, clipping=Batch(), batch_size=20)
        train(model, private, 2)


def test_statistics_that_come_back_are_refused() -> None:
    model, private = private_run(normalized(), clipping=Batch(), sampling="full")
    train(model, private, 1)
    model[1] = nn.BatchNorm1d(HIDDEN)
    model[1].weight, model[1].bias = [private._context.parameters[n] for n in ("1.weight", "1.bias")]
    losses = losses_of(model, next(iter(private.loader)))
    with pytest.raises(UnsupportedModelError, match="running statistics"):
        private.step(losses)


class Remembering(nn.Linear):
    """Keeps the mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x.detach().sum(0))
        return super().forward(x)


@pytest.mark.parametrize("make", [Remembering, lambda: nn.utils.spectral_norm(nn.Linear(FEATURES, CLASSES))])
def test_other_buffers_stay_guarded(make: Any) -> None:
    model, private = private_run(make(), clipping=Batch(), sampling="full")
    losses = losses_of(model, next(iter(private.loader)))
    with pytest.raises(UnsupportedModelError, match="Buffer"):
        private.step(losses)


class Averaging(nn.Linear):
    """Keeps a running mean of its inputs in a plain attribute: a new tensor, or the same one in place."""

    def __init__(self, first: Any, in_place: bool = False) -> None:
        super().__init__(FEATURES, CLASSES)
        self.mean, self.in_place = first, in_place

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().mean(0)
        if self.in_place:
            self.mean.mul_(0.9).add_(0.1 * new)
        else:
            self.mean = 0.9 * self.mean + 0.1 * new
        return super().forward(x - self.mean)


@pytest.mark.parametrize("clipping", [Batch(), PerExample()], ids=["batch", "per example"])
@pytest.mark.parametrize("first, in_place", [(0, False), (torch.zeros(FEATURES), False),
                                             (torch.zeros(FEATURES), True)])  # fmt: skip
def test_a_plain_attribute_learns_nothing_either(clipping: Any, first: Any, in_place: bool) -> None:
    model, private = private_run(Averaging(first, in_place), clipping=clipping, sampling="full")
    losses = losses_of(model, next(iter(private.loader)))
    with pytest.raises(UnsupportedModelError, match="Attribute 'mean' was set or changed"):
        private.step(losses)


def test_an_attribute_that_stays_is_accepted() -> None:
    model = Averaging(torch.zeros(FEATURES))
    model.forward = lambda x: nn.Linear.forward(model, x - model.mean)  # type: ignore[method-assign]
    _, private = private_run(model, clipping=PerExample(), sampling="full")
    for batch in private.loader:
        private.step(losses_of(model, batch))


def test_check_accepts_coupled_losses_for_coupled_strategies() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    batch = tuple(t[:6] for t in data().tensors)
    assert check(normalized(), loss, batch, clipping=Batch()).ok
    assert "running statistics" in str(check(normalized(keep=True), loss, batch, clipping=Batch()))
    assert "single number" in str(check(network(), loss, batch))
    assert "Buffer" in str(check(Remembering(), loss, batch, clipping=Batch()))
    assert "Batch(max_norm=" in str(check(normalized(), loss, batch))


# Users


def user_run(**options: Any) -> tuple[nn.Module, Private]:
    return private_run(**{"clipping": Batch(1.0), "group": USERS, "batch_size": 3, **options})


def test_users_are_drawn_with_all_their_records() -> None:
    model, private = user_run(sampling="full", batch_size=None)
    sizes = []
    for x, y in private.loader.pieces():
        sizes.append(len(x))
        private.step(losses_of(model, (x, y)))
    assert sizes == [6, 6, 6, 6, 6, 5, 5] and private.steps == 1
    assert private._context.clipper.divisor == 7


def test_the_unit_is_the_user_everywhere(tmp_path: Path) -> None:
    records = 12_377
    model, private = user_run(
        dataset=data(records), group=[i % 7 for i in range(records)], ledger=tmp_path / "run.ledger"
    )
    assert private.parts()[0].sensitivity == 1.0  # C, under zero-out
    assert private._context.event.sample_rate == 3 / 7 and private._context.event.unit is Unit.USER
    train(model, private, 3)
    assert private.spent().unit is Unit.USER and "one user" in str(private.spent())
    text = str(private.statement())
    assert "one user (data set: 7 users)" in text
    assert "one user is replaced by an empty one (the number of users is public)" in text
    assert "each user is included independently" in text
    assert "the sum of the clipped mean gradients of the users" in text
    assert "have the id of that user" in text
    state = json.dumps(private.state_dict(), default=repr)
    private.close()
    from_file = statement.of_ledger(tmp_path / "run.ledger")
    assert from_file.dataset_size == 7 and "one user (data set: 7 users)" in str(from_file)
    for shown in (text, state, (tmp_path / "run.ledger").read_text(), repr(private.loader)):
        assert not re.search(rf"\b({records}|{records // 7}|{records // 7 + 1})\b", shown)  # that is not public


def test_replacing_a_user_counts_twice() -> None:
    _, private = user_run(sampling="fixed-size")
    assert private.parts()[0].sensitivity == 2.0


def test_a_strategy_that_cannot_protect_users_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"group=.*PerExample.*Batch"):
        user_run(clipping=PerExample())
    with pytest.raises(ConfigurationError, match=r"microbatches=4 with group="):
        user_run(clipping=Batch(1.0, microbatches=4))
    with pytest.raises(ConfigurationError, match="one user id for each record"):
        user_run(group=USERS[:-1])
    with pytest.raises(ConfigurationError, match="batch_size"):
        user_run(batch_size=8)  # there are seven users


def test_delta_and_budget_go_by_users() -> None:
    with pytest.warns(UserWarning, match="not below 1/N=0.14"):
        model, private = user_run(epsilon=3.0, delta=0.15, steps=4)
    train(model, private, 4)
    assert private.spent().epsilon <= 3.0


# Local updates


def local_sgd(model: nn.Module, batch: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        losses_of(model, batch).mean().backward()
        optimizer.step()


def test_sgd_with_rate_one_adds_the_mean_change() -> None:
    """DP-FedAvg without noise and with a bound that is never reached."""
    model = network()
    trained = []
    x, y = data().tensors
    for user in range(7):
        copied = copy.deepcopy(model)
        local_sgd(copied, (x[user::7], y[user::7]))
        trained.append(parameters(copied))
    clipping = Batch(1e6, local_update=local_sgd)
    _, private = user_run(
        model=model,
        optimizer=sgd(model, lr=1.0),
        clipping=clipping,
        sampling="full",
        batch_size=None,
        noise_multiplier=0,
    )
    done = [private.step_local_update(batch) for batch in private.loader.pieces()]
    assert done == [False] * 6 + [True]
    for name, p in parameters(model).items():
        torch.testing.assert_close(p, sum(t[name] for t in trained) / 7)


def test_step_and_step_local_update_refuse_each_other() -> None:
    model, private = private_run(clipping=Batch(local_update=local_sgd))
    with pytest.raises(StepError, match="step_local_update"):
        private.compiled(lambda x, y: x)
    for batch in private.loader:
        with pytest.raises(StepError, match="step_local_update"):
            private.step(losses_of(model, batch))
        assert private.step_local_update(batch)
        with pytest.raises(StepError, match="without a new batch"):
            private.step_local_update(batch)
    for clipping in (Batch(), PerExample()):
        model, private = private_run(clipping=clipping)
        for batch in private.loader:
            with pytest.raises(StepError, match=r"private.step\(losses\)"):
                private.step_local_update(batch)
            break


def test_an_empty_batch_makes_no_local_update() -> None:
    called = []
    model, private = private_run(clipping=Batch(1.0, 2, local_update=lambda m, s: called.append(1)), sample_rate=1e-9)
    for batch in private.loader.pieces():
        if private.step_local_update(batch):
            break
    assert called == [] and all(bool(g.any()) for g in gradients(model).values())


def test_a_local_update_must_not_change_the_model_itself() -> None:
    model = network()

    def backward(copied: nn.Module, batch: Any) -> None:
        losses_of(model, batch).mean().backward()

    def change(copied: nn.Module, batch: Any) -> None:
        with torch.no_grad():
            model[0].weight.add_(1.0)

    for update, error in ((backward, StepError), (change, UnsupportedModelError)):
        model.zero_grad()
        _, private = private_run(model, clipping=Batch(local_update=update), sampling="full")
        batch = next(iter(private.loader))
        with pytest.raises(error):
            private.step_local_update(batch)


def test_a_local_update_reveals_no_size() -> None:
    """torch's own error on a single record says how many there were."""

    def update(model: nn.Module, batch: Any) -> None:
        model(batch[0][:1]).sum().backward()

    _, private = private_run(normalized(keep=True), clipping=Batch(1.0, local_update=update), sampling="full")
    with pytest.raises(StepError, match=r"batch norm.*without_running_statistics") as refusal:
        private.step_local_update(next(iter(private.loader)))
    assert "size" not in str(refusal.value) and refusal.value.__context__ is None


def test_check_lets_a_local_update_have_a_copy_to_learn_in() -> None:
    model, batch = normalized(keep=True), tuple(t[:6] for t in data().tensors)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    before = {name: b.clone() for name, b in model.named_buffers()}
    assert check(model, loss, batch, clipping=Batch(1.0, local_update=local_sgd)).ok
    assert same(before, dict(model.named_buffers()))
    frozen = model.requires_grad_(False)
    assert "no trainable parameter" in str(check(frozen, loss, batch, clipping=Batch(local_update=local_sgd)))


def test_running_statistics_of_the_copy_are_thrown_away() -> None:
    model = normalized(keep=True)
    before = {name: b.clone() for name, b in model.named_buffers()}
    _, private = private_run(model, clipping=Batch(local_update=local_sgd), sampling="full")
    for batch in private.loader:
        private.step_local_update(batch)
    assert same(before, dict(model.named_buffers()))


# Seeds, stop and resume


def test_other_microbatches_or_users_are_another_run() -> None:
    """A resume file of a run without it is not used, and the reverse."""

    def digests(**options: Any) -> tuple[str, str]:
        _, private = private_run(sample_rate=1e-9, **options)
        return private.state_dict()["fingerprint"], resume.data_digest(private._context)

    every = [
        digests(clipping=Batch()),
        digests(clipping=Batch(1.0, 2)),
        digests(clipping=Batch(), group=list(range(SIZE))),
        digests(clipping=Batch(), group=[*range(SIZE - 1), 0]),
        digests(clipping=Batch(), group=[*range(SIZE - 1), 1]),
    ]
    assert len(set(every)) == 5 and digests(clipping=Batch()) == every[0]


@pytest.mark.parametrize("kind", ["microbatches", "users", "local"])
def test_stopping_in_the_middle_of_a_batch_changes_nothing(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"clipping": Batch(1.0, microbatches=4)}
    if kind == "users":
        options = {"clipping": Batch(1.0), "group": USERS, "sampling": "fixed-size", "batch_size": 3}
    if kind == "local":
        options = {"clipping": Batch(1.0, microbatches=4, local_update=local_sgd)}

    def step(model: nn.Module, private: Private, batch: Any) -> bool:
        return private.step_local_update(batch) if kind == "local" else private.step(losses_of(model, batch))

    def go(model: nn.Module, private: Private, steps: int) -> None:
        while steps > 0:
            for batch in private.loader.pieces():
                steps -= step(model, private, batch)
                if steps == 0:
                    break

    model, private = private_run(ledger=tmp_path / "run.ledger", **options)
    straight, twin = private_run(**options)
    twin._context.keys.key = NoiseKey(private._context.keys.key.secret_bytes())
    go(straight, twin, 5)
    go(model, private, 2)
    assert not step(model, private, next(iter(private.loader.pieces())))  # one microbatch of the third batch
    checkpoint.save(tmp_path / "run.pt", {"model": model.state_dict(), "private": private.state_dict()})
    private.close()
    model, private = private_run(network(seed=9), ledger=tmp_path / "run.ledger", **options)
    state = checkpoint.load(tmp_path / "run.pt")
    model.load_state_dict(state["model"])
    private.load_state_dict(state["private"])
    assert private.steps == 2
    go(model, private, 3)
    assert same(parameters(model), parameters(straight)) and private.steps == 5


def test_a_batch_that_is_begun_again_counts_no_record_twice() -> None:
    found = []
    for is_left in (False, True):
        model, private = private_run(clipping=Batch(1e6, 4), sampling="full", noise_multiplier=0)
        if is_left:
            for number, batch in enumerate(private.loader.pieces()):
                private.step(losses_of(model, batch))
                if number == 2:
                    break
        found.append(released(model, private))
    assert same(*found)


# The statement


def test_the_statement_names_microbatches_and_what_they_rest_on() -> None:
    texts = {}
    for name, clipping in (
        ("whole", Batch()),
        ("sets", Batch(1.0, 4)),
        ("local", Batch(1.0, 4, local_update=lambda m, b: None)),
        ("example", PerExample()),
    ):
        texts[name] = str(private_run(clipping=clipping, seed=1)[1].statement())
        model, private = private_run(clipping=clipping)
        for batch in private.loader.pieces():
            private.step_local_update(batch) if name == "local" else private.step(losses_of(model, batch))
        texts[name] = str(private.statement())
    assert "on the clipped mean gradient of the whole batch with noise" in texts["whole"]
    assert "on the sum of the clipped mean gradients of 4 microbatches" in texts["sets"]
    assert "on the sum of the clipped local updates of 4 microbatches" in texts["local"]
    assert "on the clipped sum with noise" in texts["example"]
    for name, text in texts.items():
        assert ("depends on its own example only" in text) == (name == "example")
        assert ("depends only on that microbatch" in text) == (name != "example")
        assert "all: 2" in text or name == "example"


def test_statistics_that_the_model_itself_learns_between_local_updates_are_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    # Large batches: torch's batch norm fails on a microbatch of one record.
    model, private = private_run(
        model=model, batch_size=38, sampling="fixed-size", clipping=Batch(1.0, 2, local_update=local_sgd)
    )
    drawn = iter(private.loader.pieces())
    private.step_local_update(next(drawn))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        private.step_local_update(next(drawn))
    model(torch.randn(8, FEATURES))  # a training loss for a progress bar, say
    with pytest.raises(StepError, match=r"'1.running_mean' is not what the last release.*model.eval\(\)"):
        next(drawn)
