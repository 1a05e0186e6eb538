"""Batch norm without running statistics, and statistics from public data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.layers import BatchStatisticsNorm, recompute_statistics, without_running_statistics


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (5, 3)),
        (nn.BatchNorm1d(3), (5, 3, 4)),
        (nn.BatchNorm2d(3, eps=0.1), (2, 3, 4, 4)),
        (nn.BatchNorm3d(3, affine=False), (2, 3, 2, 2, 2)),
    ],
)
def test_it_computes_what_batch_norm_does_in_training(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    own = without_running_statistics(copy.deepcopy(layer))
    assert isinstance(own, BatchStatisticsNorm)
    x, before = torch.randn(shape) * 3 + 1, {k: v.clone() for k, v in own.state_dict().items()}
    torch.testing.assert_close(own(x), layer(x))
    assert all(torch.equal(v, before[k]) for k, v in own.state_dict().items())  # and stores nothing
    own.eval()
    layer.train()
    torch.testing.assert_close(own(x), layer(x))  # batch statistics in evaluation too


def test_names_parameters_and_modes_stay() -> None:
    model = network()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    assert without_running_statistics(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys and model[1].training
    model.load_state_dict(network().state_dict())


def test_nested_and_odd_layers_are_found_and_frozen_ones_stay() -> None:
    model = nn.ModuleDict(
        {
            "inner": nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))),
            "plain": nn.BatchNorm1d(2, track_running_stats=False),
            "frozen": nn.BatchNorm1d(2).eval(),
        }
    )
    without_running_statistics(model)
    assert isinstance(model["inner"][0][0], BatchStatisticsNorm)
    assert isinstance(model["plain"], BatchStatisticsNorm)
    assert type(model["frozen"]) is nn.BatchNorm1d


@pytest.mark.parametrize("same_parent", [True, False])
def test_a_layer_that_is_used_twice_stays_one(same_parent: bool) -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Tanh(), norm if same_parent else nn.Sequential(norm))
    keys = list(model.state_dict())
    without_running_statistics(model)
    second = model[2] if same_parent else model[2][0]
    assert isinstance(second, BatchStatisticsNorm) and second is model[0]
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("has_statistics", [False, True])
def test_evaluation_can_be_exported(has_statistics: bool) -> None:
    model, x = without_running_statistics(network()), torch.randn(5, 3)
    if has_statistics:
        recompute_statistics(model, [torch.randn(20, 3)])
    model.eval()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},)).module()
    torch.testing.assert_close(exported(x), model(x))
    torch.testing.assert_close(exported(x[:3]), model(x[:3]))


def test_whether_there_are_statistics_follows_the_state() -> None:
    model, other = without_running_statistics(network()), without_running_statistics(network())
    recompute_statistics(model, [torch.randn(20, 3)])
    fresh = other.state_dict()
    fresh = {name: value.clone() for name, value in fresh.items()}
    other.load_state_dict(model.state_dict())
    assert other[1].has_statistics and copy.deepcopy(other)[1].has_statistics
    torch.testing.assert_close(other.eval()(torch.ones(1, 3)), model(torch.ones(1, 3)))
    other.load_state_dict(fresh)
    assert not other[1].has_statistics
    model[1].reset_running_stats()
    assert not model[1].has_statistics


def test_types_and_devices_follow() -> None:
    own = without_running_statistics(nn.BatchNorm1d(3).double())
    assert own.running_mean.dtype == torch.float64  # type: ignore[union-attr]
    own(torch.randn(4, 3).double())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_of_one_or_none_is_no_error(rows: int, affine: bool) -> None:
    """Poisson subsampling can draw it, and an error would reveal that."""
    own = without_running_statistics(nn.BatchNorm1d(3, affine=affine))
    x = torch.randn(rows, 3, requires_grad=True)
    out = own(x)
    out.sum().backward()
    assert out.shape == (rows, 3)
    expected = own.bias if affine else torch.zeros(3)
    assert torch.equal(out, expected.expand(rows, 3))
    assert not bool(x.grad.any())


@pytest.mark.parametrize("kind", ["lazy", "sync"])
def test_layers_that_it_cannot_replace_are_named(kind: str) -> None:
    layer = nn.LazyBatchNorm1d() if kind == "lazy" else nn.SyncBatchNorm(3)
    with pytest.raises(UnsupportedModelError, match="BatchNorm"):
        without_running_statistics(nn.Sequential(layer))


def test_statistics_are_those_of_all_public_values() -> None:
    model = without_running_statistics(nn.Sequential(nn.BatchNorm1d(3)))
    x = torch.randn(50, 3) * torch.tensor([1.0, 10.0, 1e-2]) + 1e3
    assert recompute_statistics(model, [x[:20], (x[20:], "label")]) is model
    norm = model[0]
    torch.testing.assert_close(norm.running_mean, x.double().mean(0).float())
    torch.testing.assert_close(norm.running_var, x.double().var(0).float(), rtol=1e-5, atol=0.0)
    assert not model.training and norm.has_statistics


def test_evaluation_uses_them_per_row_and_training_never_changes_them() -> None:
    model = recompute_statistics(without_running_statistics(network()), [torch.randn(64, 3)])
    x = torch.randn(8, 3)
    torch.testing.assert_close(torch.cat([model(row[None]) for row in x]), model(x))
    before = copy.deepcopy(model.state_dict())
    model.train()
    assert not torch.allclose(torch.cat([model(x[:4]), model(x[4:])]), model(x))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    other = without_running_statistics(network())
    other.load_state_dict(before)
    plain = network()
    plain.load_state_dict(before)
    torch.testing.assert_close(other.eval()(x), plain.eval()(x))  # the state fits an ordinary batch norm


def test_later_layers_get_the_same_inputs_as_in_training() -> None:
    """One batch: the result is that of an ordinary layer after one batch with momentum 1."""
    x = torch.randn(32, 3)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=1.0), nn.ReLU(), nn.BatchNorm1d(4, momentum=1.0))
    own = without_running_statistics(copy.deepcopy(plain))
    plain(x)
    recompute_statistics(own, [x])
    for mine, theirs in zip(own.eval().buffers(), plain.eval().buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dropout_is_off_and_a_forward_can_be_given() -> None:
    model = without_running_statistics(nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3)))
    x = torch.randn(16, 3)

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(batch["x"])
        return result

    recompute_statistics(model, [{"x": x}], forward)
    torch.testing.assert_close(model[1].running_mean, x.mean(0))


def test_no_public_data_and_ordinary_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="public_batches"):
        recompute_statistics(without_running_statistics(network()), [])
    with pytest.raises(UnsupportedModelError, match=r"'1'.*without_running_statistics"):
        recompute_statistics(network(), [torch.randn(4, 3)])


def test_statistics_that_are_not_finite_are_refused_and_change_nothing() -> None:
    model = without_running_statistics(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3)))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    nn.init.constant_(model[1].weight, torch.inf)
    before["1.weight"].fill_(torch.inf)
    with pytest.raises(ConfigurationError, match=r"layer '2' values that are not finite"):
        recompute_statistics(model, [torch.randn(8, 2)])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
