"""Public statistics: one function in training and evaluation, exact per-example gradients, no stale statistics."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipwise.clipping import PerExample
from clipwise.errors import ConfigurationError, StepError
from clipwise.gradients import METHODS, FallbackWarning
from clipwise.layers.public_batchnorm import PUBLIC_KINDS, PublicBatchNorm
from clipwise.layers.public_statistics import PublicStatistics
from clipwise.validation.inventory import Changes
from tests.gradients.cases import losses as some_losses
from tests.gradients.cases import oracle, trainable
from tests.layers.normalized import SOUND, images, labels, losses_of, network, public, sound
from tests.optimizers import ThroughData
from tests.sites import site

SHAPES = [(PublicBatchNorm, ()), (PublicBatchNorm, (5,)), (PublicBatchNorm, (3, 2)), (PublicBatchNorm, (2, 1, 3))]
BY_KIND = pytest.mark.parametrize("kind", SOUND)


@pytest.mark.parametrize(("layer", "shape"), SHAPES)
@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_it_is_batch_norm_with_the_rows_of_its_kind(
    layer: type[PublicBatchNorm], shape: tuple[int, ...], kind: str
) -> None:
    """Per row: public rows alone, or with one example, in torch's own batch norm."""
    torch.manual_seed(0)
    norm, rows, x = (
        layer(4, kind=kind).double(),
        torch.randn(7, 4, *shape).double(),
        3 * torch.randn(5, 4, *shape).double(),
    )
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    PublicStatistics(norm, rows).refresh()
    for row, found in zip(x, norm(x), strict=True):
        together = torch.cat([row[None], rows]) if kind == "self+public" else rows
        mean, var = (
            together.transpose(0, 1).flatten(1).mean(1),
            together.transpose(0, 1).flatten(1).var(1, correction=0),
        )
        expected = F.batch_norm(row[None], mean, var, norm.weight, norm.bias)
        torch.testing.assert_close(found[None], expected, rtol=1e-12, atol=1e-12)


@BY_KIND
def test_training_and_evaluation_compute_the_same_function_of_one_example(kind: str) -> None:
    model, _ = sound(kind)
    x = images(6)
    trained = model.train()(x)
    alone = torch.cat([model.eval()(row[None]) for row in x])
    torch.testing.assert_close(trained, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@BY_KIND
def test_every_method_gives_the_gradient_of_a_separate_pass(kind: str, method: str) -> None:
    model, _ = sound(kind)
    x = images(5)
    each = oracle(model, (x,))
    squares = sum(g.flatten(1).square().sum(1) for g in each.values())
    weights = (0.5 / squares.sqrt()).clamp(max=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)  # and each has a rule
        total = PerExample(0.5, method=method).attach(site(model)).clipped_sum(some_losses(model, (x,)))
    for name in trainable(model):
        expected = torch.einsum("b,b...->...", weights, each[name])
        torch.testing.assert_close(total[name], expected, rtol=1e-8, atol=1e-9)


@BY_KIND
def test_an_empty_batch_goes_through(kind: str) -> None:
    model, _ = sound(kind)
    total = PerExample().attach(site(model)).clipped_sum(losses_of(model, images(0), labels(0)))
    assert not any(t.any() for t in total.values())


def through_everything(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of the summed loss with statistics as functions of the weights, in an independent implementation."""
    model = network()
    h, p = x, public()
    for layer in model:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            var, mean = torch.var_mean(p, [0, *range(2, p.dim())], correction=0)
            wide = [1, -1, *[1] * (p.dim() - 2)]
            r = (var + layer.eps).rsqrt()
            h, p = ((t - mean.view(wide)) * (r * layer.weight).view(wide) + layer.bias.view(wide) for t in (h, p))
        else:
            h, p = layer(h), layer(p)
    F.cross_entropy(h, y, reduction="sum").backward()
    return {name: q.grad for name, q in model.named_parameters()}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(size=st.integers(1, 6), seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 20.0]))
def test_public_exact_includes_the_gradient_of_the_statistics(size: int, seed: int, scale: float) -> None:
    model, statistics = sound("public-exact")
    x, y = scale * images(size, seed=seed), labels(size, seed)
    names, parameters = zip(*model.named_parameters(), strict=True)
    released = torch.autograd.grad(losses_of(model, x, y).sum(), parameters)
    corrected = statistics.correct(dict(zip(names, released, strict=True)))
    expected = through_everything(x, y)
    assert set(corrected) == set(expected)
    longest = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((corrected[name] - gradient).norm()) <= 1e-10 * longest, name
    # Without the correction it is far off, mostly in biases: their true gradient is 0.
    assert float(released[names.index("0.weight")].sub(expected["0.weight"]).norm()) > 1e-3 * longest


def test_a_correction_is_linear_and_leaves_other_entries_alone() -> None:
    model, statistics = sound("public-exact")
    one, other = ({n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in range(2))
    both = {n: one[n] + 2 * other[n] for n in one} | {"count": torch.tensor(3.0)}
    expected = {n: statistics.correct(one)[n] + 2 * statistics.correct(other)[n] for n in one}
    found = statistics.correct(both)
    assert found.pop("count") == 3
    torch.testing.assert_close(found, expected)


def test_a_norm_without_trainable_predecessors_has_no_correction() -> None:
    alone = PublicBatchNorm(2, kind="public-exact")
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), PublicBatchNorm(2, kind="public-exact"))
    behind = nn.Sequential(PublicBatchNorm(2, kind="public-exact"), nn.Linear(2, 1))
    for model in (alone, frozen, behind):
        statistics = PublicStatistics(model, torch.randn(4, 2))
        statistics.refresh()
        released = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
        torch.testing.assert_close(statistics.correct(released), released)


def test_two_releases_at_the_same_weights_get_the_same_correction() -> None:
    """As in gradient accumulation: the graph of the public pass is computed again."""
    model, statistics = sound("public-exact")
    released = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    torch.testing.assert_close(statistics.correct(released), statistics.correct(released))


def test_a_correction_needs_the_gradients_of_scale_and_shift() -> None:
    model, statistics = sound("public-exact")
    released = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    place, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, PublicBatchNorm))
    without = {name: g for name, g in released.items() if name != f"{place}.bias"}
    for gradients in (without, released | {f"{place}.weight": torch.zeros(layer.num_features + 1)}):
        with pytest.raises(ConfigurationError, match=f"Layer '{place}'.*gradients of its scale and shift"):
            statistics.correct(gradients)


def test_the_other_kinds_correct_nothing() -> None:
    for kind in ("public", "self+public", "frozen", "group"):
        model, statistics = sound(kind)
        released = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        assert all(g is released[n] for n, g in statistics.correct(released).items())


def test_exactness_needs_a_scale_and_a_shift_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="scale and a shift"):
        PublicBatchNorm(4, affine=False, kind="public-exact")
    frozen = nn.Sequential(PublicBatchNorm(2, kind="public-exact"))
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"'0'.*bias of its own"):
        PublicStatistics(frozen, torch.randn(3, 2))
    shared = nn.Sequential(PublicBatchNorm(2, kind="public-exact"), PublicBatchNorm(2, kind="public-exact"))
    shared[1].weight = shared[0].weight
    with pytest.raises(ConfigurationError, match=r"'0'.*weight of its own"):
        PublicStatistics(shared, torch.randn(3, 2))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_stale_statistics_are_an_error(kind: str, mode: bool) -> None:
    model, statistics = sound(kind)
    model.train(mode)
    assert not statistics.refresh()
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(StepError, match="stale"):
        model(images(2))
    with pytest.raises(StepError, match="stale"):
        statistics.freeze()
    assert statistics.refresh()
    assert not statistics.refresh()
    assert statistics.refresh(force=True)
    model(images(2))


def test_an_update_a_loaded_state_another_layer_and_another_precision_make_them_stale() -> None:
    model, statistics = sound("public-exact")
    optimizer = torch.optim.Adam(model.parameters())
    state = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for change in (
        optimizer.step,
        lambda: model.load_state_dict(state),
        lambda: model[1].running_mean.zero_(),
        lambda: model.float(),
        lambda: setattr(model[10], "weight", nn.Parameter(torch.zeros(3, 16))),
    ):
        assert statistics.is_fresh
        change()
        assert not statistics.is_fresh
        with pytest.raises(StepError, match="stale"):
            statistics.correct({n: p.detach() for n, p in model.named_parameters()})
        statistics.refresh()
    assert model[1].running_mean.dtype == torch.float32
    model(images(2, torch.float32))


def moved_otherwise(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(1.5 * vector, model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True).step(),
        lambda m: torch.optim.Adam(m.parameters(), 0.1, fused=True).step(),
        lambda m: torch.optim.Adagrad(m.parameters(), 0.1, fused=True).step(),
        lambda m: ThroughData(m.parameters()).step(),
        moved_otherwise,
    ],
)
def test_changes_that_torch_does_not_count_are_detected(change: object) -> None:
    model, statistics = sound("public", torch.float32)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    change(model)  # type: ignore[operator]
    assert not statistics.is_fresh
    with pytest.raises(StepError, match="stale"):
        model(images(2, torch.float32))
    assert statistics.refresh() and statistics.is_fresh
    model(images(2, torch.float32))


def test_in_a_forward_pass_one_layer_compares_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = sound("public")
    looks = []
    look = Changes.has_moved
    monkeypatch.setattr(Changes, "has_moved", lambda self: looks.append(1) or look(self))
    model(images(2))
    assert len(looks) == 1


def test_weights_that_are_not_finite_do_not_count_as_changed() -> None:
    model, statistics = sound("public")
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = torch.nan
    statistics.refresh()
    assert statistics.is_fresh


def test_a_copy_has_statistics_of_its_own() -> None:
    model, statistics = sound("public-exact")
    other = copy.deepcopy(model)
    with pytest.raises(StepError, match="stale"):
        other(images(2))
    with torch.no_grad():
        other[0].weight.mul_(-2).add_(0.1)
    assert PublicStatistics.of(other) is not statistics
    PublicStatistics.of(other).refresh()
    assert statistics.is_fresh
    assert not torch.equal(other(images(2)), model(images(2)))


def test_a_layer_without_statistics_is_an_error() -> None:
    with pytest.raises(StepError, match="no public statistics"):
        PublicBatchNorm(2)(torch.randn(3, 2))
    with pytest.raises(ConfigurationError, match="0 public statistics"):
        PublicStatistics.of(nn.Linear(2, 2))


def test_a_frozen_model_works_without_the_rows() -> None:
    model, statistics = sound("self+public")
    x = images(4)
    before = model(x)
    assert statistics.freeze() is model
    with pytest.raises(ConfigurationError):
        PublicStatistics.of(model)
    torch.testing.assert_close(model(x), before)
    with torch.no_grad():
        model[0].weight.add_(1)
    model(x)  # constants do not follow the weights
    assert not statistics.refresh()


@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_a_model_is_exported_as_a_frozen_copy(kind: str) -> None:
    model, _ = sound(kind)
    with pytest.raises(Exception, match=r"stale.*freeze\(\)"):
        torch.export.export(model, (images(3),))
    other = copy.deepcopy(model)
    statistics = PublicStatistics.of(other)
    statistics.refresh()
    exported = torch.export.export(statistics.freeze(), (images(3),))
    torch.testing.assert_close(exported.module()(images(3)), model(images(3)))


def rebuilt(kind: str) -> nn.Module:
    """The network built without the public rows: frozen, with other weights."""
    model, statistics = sound(kind)
    statistics.freeze()
    for layer in model.modules():
        if isinstance(layer, PublicBatchNorm):
            layer.rows = 0
    for t in [*model.parameters(), *model.buffers()]:
        t.detach().zero_()
    return model


@pytest.mark.parametrize("kind", PUBLIC_KINDS)
def test_a_frozen_model_can_be_saved_and_loaded(kind: str) -> None:
    model, statistics = sound(kind)
    statistics.freeze()
    other = rebuilt(kind)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images(4)), model(images(4)))


@pytest.mark.parametrize("kind", [*PUBLIC_KINDS, "frozen"])
def test_plain_batch_norm_loads_the_state_of_supported_kinds(kind: str) -> None:
    model, _ = sound(kind)
    plain = network().eval()
    state = model.state_dict()
    if kind == "self+public":
        with pytest.raises(RuntimeError, match="public_rows"):
            plain.load_state_dict(state)
        return
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(images(4)), model(images(4)))


def test_a_state_without_the_number_of_rows() -> None:
    """It is stored if the statistics are computed here; otherwise it is required."""
    state = network().state_dict()
    model, statistics = sound("self+public")
    before = model(images(3))
    model.load_state_dict(state)
    statistics.refresh()
    torch.testing.assert_close(model(images(3)), before)
    elsewhere = rebuilt("self+public")
    with pytest.raises(RuntimeError, match=r"Missing key.*public_rows"):
        elsewhere.load_state_dict(state)
    elsewhere.load_state_dict(state, strict=False)
    with pytest.raises(StepError, match="without a number of public rows"):
        elsewhere(images(3))


def test_statistics_of_these_rows_count_these_rows() -> None:
    """The loaded state does not change the number of rows."""
    model, statistics = sound("self+public")
    before = model(images(3))
    state = model.state_dict()
    model.load_state_dict({n: torch.tensor(99) if n.endswith("public_rows") else t for n, t in state.items()})
    statistics.refresh()
    assert torch.equal(model(images(3)), before)


class Again(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.norm, self.times = PublicBatchNorm(2), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.norm(x)
        return x


def test_a_layer_is_called_once_per_pass() -> None:
    with pytest.raises(ConfigurationError, match=r"'norm'.*more than once"):
        PublicStatistics(Again(2), torch.randn(3, 2)).refresh()
    with pytest.raises(ConfigurationError, match=r"'norm'.*not reached"):
        PublicStatistics(Again(0), torch.randn(3, 2)).refresh()


def test_one_public_statistics_serves_a_model() -> None:
    model, _ = sound("public")
    with pytest.raises(ConfigurationError, match=r"'1' has public statistics already"):
        PublicStatistics(model, public())
    with pytest.raises(ConfigurationError, match=r"'norm'.*needs public rows"):
        PublicStatistics(Again(1), None)


@pytest.mark.parametrize(
    "rows",
    [torch.randn(1, 2), (), torch.tensor(3.0), (torch.randn(3, 2), torch.randn(4, 2)), ["a"], np.zeros((3, 2)), 7],
)
def test_public_rows_must_be_rows(rows: object) -> None:
    with pytest.raises(ConfigurationError, match="public must"):
        PublicStatistics(Again(1), rows)  # type: ignore[arg-type]


def test_inputs_must_have_the_shape_of_the_layer() -> None:
    for layer, x in ((PublicBatchNorm(3), torch.randn(3)), (PublicBatchNorm(3), torch.randn(2, 4))):
        with pytest.raises(ConfigurationError, match=r"takes inputs of shape \[B, 3"):
            layer(x)
    with pytest.raises(ConfigurationError, match="kind='private' is not known"):
        PublicBatchNorm(3, kind="private")


class Recurrent(nn.Module):
    """A recurrent layer before a norm. Records how it is run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTM(3, 4, dropout=0.5, num_layers=2), PublicBatchNorm(4, kind=kind)
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.is_grad_enabled(), self.cell.training, torch.backends.cudnn.enabled))
        return self.norm(self.cell(x.transpose(0, 1))[0][-1])


@pytest.mark.parametrize(
    ("kind", "expected"), [("public", (False, False, True)), ("public-exact", (True, False, False))]
)
def test_cudnn_is_off_for_a_backward_pass_through_recurrent_layers(
    kind: str, expected: tuple[bool, bool, bool]
) -> None:
    """In .eval() cuDNN has no such backward pass; elsewhere the setting is unchanged."""
    model = Recurrent(kind)
    statistics = PublicStatistics(model, torch.randn(6, 5, 3))
    statistics.refresh()
    assert model.seen == [expected]
    assert torch.backends.cudnn.enabled and model.cell.training
    statistics.correct({name: torch.ones_like(p) for name, p in model.named_parameters()})


def test_convolutions_keep_cudnn() -> None:
    model, statistics = sound("public-exact")
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    statistics.refresh(force=True)
    assert seen == [True]


def test_the_public_pass_is_not_random_and_keeps_modes() -> None:
    model = nn.Sequential(nn.Dropout(0.5), PublicBatchNorm(2), nn.Dropout(0.5).eval())
    statistics = PublicStatistics(model, torch.randn(5, 2))
    statistics.refresh()
    first = model[1].running_mean.clone()
    statistics.refresh(force=True)
    assert torch.equal(first, model[1].running_mean)
    assert [m.training for m in model] == [True, True, False]
