"""Running statistics with per-example clipping: layers that normalize by what was released before."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import Batch, NoisedStatistics, PerExample, Quantile, check, layers
from clipwise.clipping.base import Strategy
from clipwise.clipping.per_example import PerExampleClipper
from clipwise.errors import ConfigurationError, CoupledExamplesError, UnsupportedModelError
from clipwise.gradients import METHODS
from clipwise.layers import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.privacy import Adjacency
from clipwise.sampling import augmentation
from clipwise.validation.coupling import IndependenceProbe
from tests.gradients.cases import trainable
from tests.layers.normalized import images, labels, losses_of, network
from tests.runs import data, private_run, same, train
from tests.runs import network as small_network
from tests.sites import site


def released(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Three layers, in two and in one dimension, whose statistics are not trivial."""
    model = layers.with_released_statistics(network(dtype))
    random = torch.Generator().manual_seed(1)
    for layer in layers_of(model):
        layer.running_mean.copy_(0.3 * torch.randn(layer.num_features, generator=random))
        layer.running_var.copy_(torch.rand(layer.num_features, generator=random) + 0.5)
        layer.has_statistics = True
    return model


def layers_of(model: nn.Module) -> list[ReleasedStatisticsNorm]:
    return [m for m in model.modules() if isinstance(m, ReleasedStatisticsNorm)]


def attached(model: nn.Module, method: str = "auto", **options: Any) -> PerExampleClipper:
    strategy = PerExample(0.7, method=method, running_statistics=NoisedStatistics(**options))
    clipper = strategy.attach(site(model))
    assert isinstance(clipper, PerExampleClipper)
    return clipper


def test_training_and_evaluation_are_one_function_of_each_row() -> None:
    model, x = released(), images(6)
    whole = model(x)
    torch.testing.assert_close(torch.cat([model(row[None]) for row in x]), whole)
    torch.testing.assert_close(model.eval()(x), whole)
    plain = network()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain.eval()(x), whole)


@pytest.mark.parametrize("method", METHODS)
def test_the_sums_by_hand(method: str) -> None:
    """A forward pass of its own for each example. Gradients are as they are without statistics."""
    model, x, y = released(), images(5), labels(5)
    clipper = attached(model, method, max_norm=1.5)
    found = clipper.clipped_sum(losses_of(model, x, y))
    plain = PerExample(0.7, method=method).attach(site(model)).clipped_sum(losses_of(model, x, y))
    for name in trainable(model):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-12)
    for name, layer in model.named_modules():
        if not isinstance(layer, ReleasedStatisticsNorm):
            continue
        total = torch.zeros(2 * layer.num_features).double()
        for row in x:
            inner = row[None]
            for before in model:
                if before is layer:
                    break
                inner = before(inner)
            values_CT = inner[0].detach().reshape(layer.num_features, -1)
            spread_C = layer.running_var + layer.eps
            u_C = (values_CT - layer.running_mean[:, None]).mean(1) / spread_C.sqrt()
            q_C = (values_CT - layer.running_mean[:, None]).square().mean(1)
            vector = torch.cat([u_C, (q_C.clamp(min=layer.eps) + layer.eps) / spread_C - 1]).clamp(-1, 1)
            total += vector * min(1.0, 1.5 / float(vector.norm()))
        torch.testing.assert_close(found[f"statistics of {name}"], total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("adjacency", "factor"), [(Adjacency.ZERO_OUT, 1.0), (Adjacency.REPLACE_ONE, 2.0)])
def test_the_bounds_are_those_of_a_sum_of_rows(adjacency: Adjacency, factor: float) -> None:
    strategy = PerExample(0.7, running_statistics=NoisedStatistics(0.3))
    bounds = strategy.attach(site(released(), adjacency)).bounds
    assert [b.sensitivity for b in bounds[1:]] == [factor * 0.3] * 3
    assert [b.size for b in bounds[1:]] == [8, 12, 32]


def test_pieces_of_a_batch_add_up_and_an_empty_one_adds_nothing() -> None:
    model, x, y = released(), images(6), labels(6)
    clipper = attached(model)
    whole = clipper.clipped_sum(losses_of(model, x, y))
    pieces = [clipper.clipped_sum(losses_of(model, x[s], y[s])) for s in (slice(0, 1), slice(1, 6), slice(6, 6))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(p[name] for p in pieces), value, rtol=1e-5, atol=1e-9)
    assert not any(bool(v.any()) for v in pieces[2].values())


def test_one_row_that_is_not_finite_counts_as_nothing() -> None:
    model, x, y = released(), images(4), labels(4)
    clipper = attached(model)
    spoiled = torch.cat([x, torch.full_like(x[:1], math.nan)])
    one = clipper.clipped_sum(losses_of(model, spoiled, torch.cat([y, y[:1]])))
    other = clipper.clipped_sum(losses_of(model, x, y))
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-9, atol=1e-12)


def test_public_statistics_are_a_beginning() -> None:
    model = layers.with_released_statistics(network())
    layers.recompute_statistics(model, [images(64)])
    own = layers.without_running_statistics(network())
    layers.recompute_statistics(own, [images(64)])
    assert same(model.state_dict(), own.state_dict())


# Rows and examples


class Folded(nn.Module):
    """The layer gets two rows per example."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = ReleasedStatisticsNorm(2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x.reshape(-1, 2)).reshape(-1, 4)).squeeze(1)
        return result


class Turned(nn.Module):
    """The layer gets the row of the example before. The order is then restored, so no loss shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = ReleasedStatisticsNorm(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x.roll(1, 0)).roll(-1, 0)).squeeze(1)
        return result


def test_rows_that_are_no_examples_are_refused_by_name() -> None:
    model = Folded()
    with pytest.raises(UnsupportedModelError, match="'statistics of norm' does not get one row per example"):
        attached(model).clipped_sum(model(torch.randn(6, 4)))


def test_the_probe_detects_rows_that_are_not_their_own_example() -> None:
    """The losses are independent: only the statistics are not."""
    for model, is_apart in ((Turned(), False), (released(torch.float32), True)):
        attached(model)
        probe = IndependenceProbe()
        x = torch.randn(6, 4) if not is_apart else images(6, torch.float32)
        marked = probe.mark((x,))[0]
        losses = model(marked) if not is_apart else losses_of(model, marked, labels(6))
        if is_apart:
            probe.examine(losses)
        else:
            with pytest.raises(CoupledExamplesError, match="An input row of a layer of"):
                probe.examine(losses)


def test_the_probe_leaves_random_numbers_alone() -> None:
    model, probe = released(torch.float32), IndependenceProbe()
    attached(model)
    state = torch.get_rng_state()
    probe.examine(losses_of(model, probe.mark((images(4, torch.float32),))[0], labels(4)))
    assert torch.equal(torch.get_rng_state(), state)


def test_check_accepts_the_layers() -> None:
    report = check(released(torch.float32), losses_of, (images(4, torch.float32), labels(4)))
    assert report.ok and not report.notes


# A whole run


def small() -> nn.Module:
    model = small_network()
    return layers.with_released_statistics(nn.Sequential(model[0], nn.BatchNorm1d(4), *model[1:]))


@pytest.mark.parametrize("most", [None, 3])
def test_a_run_learns_from_releases_alone(most: int | None) -> None:
    """The engine's guards let the buffers change after a release. Pieces of a batch change nothing."""
    model = small()
    clipping = PerExample(1.0, running_statistics=NoisedStatistics(2.0, momentum=0.3))
    _, private = private_run(model, clipping=clipping, seed=3, max_physical_batch_size=most)
    train(model, private, 10)
    (layer,) = layers_of(model)
    assert int(layer.num_batches_tracked) == 10
    assert "statistics of 1: 2" in str(private.statement())
    assert "and the clipped statistics of 1 batch norm layer" in str(private.statement())


def test_counts_and_statistics_share_a_step() -> None:
    """z^-2 is what the count, the layer and the gradient use together, each by its own formula."""
    model, z, S = small(), 1.2, 0.5
    rule, quantile = NoisedStatistics(2.0, share=0.2), Quantile(count_noise=0.5)
    clipping = PerExample(quantile, running_statistics=rule)
    _, private = private_run(model, clipping=clipping, noise_multiplier=z, seed=3)
    gradient, count, layer = private.parts()
    assert count.noise_std == pytest.approx(0.5 * 8)
    left = z**-2 - (S / count.noise_std) ** 2
    assert (layer.sensitivity / layer.noise_std) ** 2 == pytest.approx(0.2 * left, rel=1e-6)
    assert (gradient.sensitivity / gradient.noise_std) ** 2 == pytest.approx(0.8 * left, rel=1e-6)
    train(model, private, 3)
    assert "the clipped sum and the counts and the clipped statistics of 1 batch" in str(private.statement())


def test_pieces_give_the_same_buffers() -> None:
    found = []
    for most in (None, 3):
        model = small().double()
        clipping = PerExample(1.0, running_statistics=NoisedStatistics(2.0, momentum=0.3))
        _, private = private_run(
            model, dataset=data(dtype=torch.float64), clipping=clipping, seed=3, max_physical_batch_size=most
        )
        train(model, private, 4)
        found.append(copy.deepcopy(model.state_dict()))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-8, atol=1e-9)


def test_without_noise_they_come_close_to_those_of_the_data() -> None:
    model = small()
    clipping = PerExample(1e-9, running_statistics=NoisedStatistics(100.0, momentum=0.5))
    _, private = private_run(model, clipping=clipping, noise_multiplier=0, sampling="full")
    x = data().tensors[0]
    train(model, private, 60)
    (layer,) = layers_of(model)
    inner = model[0](x).detach()
    distance = ((layer.running_mean - inner.mean(0)) / inner.std(0)).abs().max()
    assert float(distance) < 0.2
    # Entries are kept within [-1, 1], which a single row passes often: the scale comes out too small, but not by much.
    ratio = layer.running_var / inner.var(0)
    assert float(ratio.min()) > 0.3 and float(ratio.max()) < 1.1


def test_views_and_other_layers_are_refused() -> None:
    model = small()
    clipping = PerExample(1.0, running_statistics=NoisedStatistics())
    for views in ({"augmentation_multiplicity": 2}, {"augmentation": augmentation.Views(2)}):
        with pytest.raises(
            ConfigurationError, match=r"augmentation_multiplicity is not supported with.*running_statistics"
        ):
            private_run(model, clipping=clipping, **views)
    with pytest.raises(ConfigurationError, match="with_released_statistics"):
        private_run(clipping=clipping)
    mixed = nn.Sequential(BatchStatisticsNorm(5), *small())
    with pytest.raises(UnsupportedModelError, match="mixes the examples"):
        private_run(mixed, clipping=clipping)


@pytest.mark.parametrize("clipping", [PerExample(), Batch()], ids=repr)
def test_layers_for_which_nothing_is_released_need_public_statistics(clipping: Strategy) -> None:
    model = small()
    with pytest.raises(ConfigurationError, match=r"has no statistics.*NoisedStatistics\(\).*recompute_statistics"):
        private_run(model, clipping=clipping)
    layers.recompute_statistics(model, [data().tensors[0]]).train()
    private_run(model, clipping=clipping)
