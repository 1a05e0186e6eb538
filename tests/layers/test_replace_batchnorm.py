"""Replacing batch normalization: what stays, what is computed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.contrib import PublicData
from clipwise.errors import ConfigurationError
from clipwise.layers import with_released_statistics, without_running_statistics
from clipwise.layers.public_batchnorm import PublicBatchNorm
from clipwise.layers.replace_batchnorm import KINDS, replace_batchnorm
from clipwise.validation.step_inputs import require_no_batch_statistics
from tests.layers.normalized import images, network, public

Replace = Callable[[nn.Module], nn.Module]

BATCH_NORM = nn.modules.batchnorm._BatchNorm


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (PublicBatchNorm, nn.GroupNorm))]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_stay_the_same_objects_under_the_same_names(kind: str) -> None:
    model = network()
    before = dict(model.named_parameters())
    same, statistics = replace_batchnorm(model, public(), kind)
    assert same is model
    assert all(before[n] is p for n, p in model.named_parameters())
    assert len(dict(model.named_parameters())) == len(before)
    assert len(norms(model)) == 3
    require_no_batch_statistics(model.train())
    assert not statistics.refresh()  # fresh, or nothing to do
    assert model(images(2)).dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_stays(training: bool) -> None:
    model, _ = replace_batchnorm(network().train(training), public(), "group")
    assert all(m.training is training for m in norms(model))


def test_a_saved_batch_norm_can_be_loaded() -> None:
    saved = network(seed=5).state_dict()
    model, statistics = replace_batchnorm(network(), public(), "public")
    model.load_state_dict(saved)
    statistics.refresh()
    assert torch.equal(model[1].weight, saved["1.weight"])
    assert set(model.state_dict()) == {n for n in saved if not n.endswith("num_batches_tracked")}


def test_frozen_statistics_are_those_that_the_layers_had() -> None:
    model, x = network(), images(9)
    for _ in range(3):
        model(x)  # learns running statistics
    expected = model.eval()(x)
    frozen, _ = replace_batchnorm(model, kind="frozen")
    torch.testing.assert_close(frozen.train()(x), expected)
    plain = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ConfigurationError, match="'0' has no running statistics"):
        replace_batchnorm(plain, kind="frozen")


def test_frozen_statistics_of_public_rows_do_not_follow_the_weights() -> None:
    followed, _ = replace_batchnorm(network(), public(), "public")
    frozen, statistics = replace_batchnorm(network(), public(), "frozen")
    torch.testing.assert_close(frozen(images(3)), followed(images(3)))
    with torch.no_grad():
        frozen[0].weight.mul_(2)
    assert not statistics.refresh()
    frozen(images(3))


def test_layer_is_layer_norm() -> None:
    model, _ = replace_batchnorm(nn.Sequential(nn.BatchNorm1d(6)), kind="layer")
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, [6]))


def test_a_layer_at_two_places_stays_one_and_a_norm_alone_is_replaced() -> None:
    norm = nn.BatchNorm1d(16)
    model, _ = replace_batchnorm(nn.Sequential(norm, nn.Tanh(), norm), kind="group")
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0] is model[2]
    alone, _ = replace_batchnorm(norm, torch.randn(4, 16), "self+public")
    assert isinstance(alone, PublicBatchNorm)


@given(st.integers(2, 300), st.sampled_from([2, 8]))
def test_groups_divide_the_channels(channels: int, fewest: int) -> None:
    layer = (nn.BatchNorm2d if fewest == 2 else nn.BatchNorm1d)(channels)
    groups = replace_batchnorm(nn.Sequential(layer), kind="group")[0][0].num_groups
    assert channels % groups == 0
    assert groups == 1 or (groups <= 32 and channels // groups >= fewest)


def test_groups_of_one_value_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'0'.*one value"):
        replace_batchnorm(nn.Sequential(nn.BatchNorm1d(4)), kind="group", groups=4)
    with pytest.raises(ConfigurationError, match=r"'0'.*groups=3 does not divide its 4"):
        replace_batchnorm(nn.Sequential(nn.BatchNorm1d(4)), kind="group", groups=3)


def test_positions_leave_two_channels_per_group() -> None:
    model, _ = replace_batchnorm(nn.Sequential(nn.BatchNorm2d(16)), kind="group")
    assert model[0].num_groups == 8


class NormWithMore(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_of_batch_norm_are_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'0' is a NormWithMore.*by hand"):
        replace_batchnorm(nn.Sequential(NormWithMore(4)), torch.randn(3, 4, 2, 2), kind)
    with pytest.raises(ConfigurationError, match=r"'0' is a LazyBatchNorm1d.*run the model once"):
        replace_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()), torch.randn(3, 4), kind)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind='lot' is not known"):
        replace_batchnorm(network(), public(), "lot")
    with pytest.raises(ConfigurationError, match="needs public rows"):
        replace_batchnorm(network())
    with pytest.raises(ConfigurationError, match=r"must be a tensor of rows .*, not TensorDataset"):
        replace_batchnorm(network(), TensorDataset(public()))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"must be a tensor of rows .*, not PublicData"):
        replace_batchnorm(network(), PublicData(TensorDataset(public()), lambda model, x: x))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="groups is for kind='group'"):
        replace_batchnorm(network(), public(), groups=2)
    with pytest.raises(ConfigurationError, match="no BatchNorm layer"):
        replace_batchnorm(nn.Linear(2, 2), torch.randn(2, 2))


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    norm = nn.BatchNorm1d(4)
    for model in (
        nn.Sequential(norm, nn.Tanh(), norm),  # one layer, two means
        nn.Sequential(norm, nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False)),
    ):
        before = list(model)
        with pytest.raises(ConfigurationError):
            replace_batchnorm(model, torch.randn(5, 4), "public-exact")
        assert list(model) == before
        model(torch.randn(3, 4))
    with pytest.raises(ConfigurationError, match="takes inputs of shape"):
        replace_batchnorm(model, torch.randn(5, 9), "public")
    assert list(model) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [without_running_statistics, with_released_statistics])
def test_layers_without_running_statistics_are_replaced_as_batch_norm_is(before: Replace, kind: str) -> None:
    torch.manual_seed(0)
    direct = network()
    torch.manual_seed(0)
    again = before(network())
    direct, again = (replace_batchnorm(model, public(), kind)[0].eval() for model in (direct, again))
    if kind != "group":  # how many groups there are depends on the type of a layer
        torch.testing.assert_close(again(images(5)), direct(images(5)))


def test_statistics_that_were_never_set_are_not_frozen() -> None:
    model = without_running_statistics(network())
    with pytest.raises(ConfigurationError, match="no running statistics to freeze"):
        replace_batchnorm(model, None, "frozen")


def test_a_layer_with_several_rows_per_example_has_no_statistics_of_one() -> None:
    """The kind "self+public" would treat a row as an example; "public" does not."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            normal: Tensor = self.norm(x.reshape(-1, 3)).reshape(len(x), -1)
            return normal

    rows = torch.randn(8, 6)
    with pytest.raises(ConfigurationError, match=r"'norm'.*gets 16 rows for 8 public ones"):
        replace_batchnorm(Folded(), rows, "self+public")
    replace_batchnorm(Folded(), rows, "public")
