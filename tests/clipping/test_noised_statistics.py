"""Running statistics from releases: what is clipped, what is learned, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import Batch, NoisedStatistics
from clipwise.clipping import Bound, noised_parts
from clipwise.clipping.batch import BatchClipper
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.noised_statistics import LayerStatistics
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.layers import BatchStatisticsNorm, without_running_statistics
from clipwise.privacy import Adjacency, effective_multiplier
from tests.gradients.cases import trainable
from tests.sites import site

QUICK = settings(max_examples=50, deadline=None, derandomize=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
    )
    without_running_statistics(model)
    return nn.Sequential(*model, nn.Flatten(0))


def alone(channels: int = 3) -> tuple[BatchStatisticsNorm, nn.Module]:
    layer = without_running_statistics(nn.BatchNorm1d(channels))
    assert isinstance(layer, BatchStatisticsNorm)
    return layer, nn.Sequential(layer, nn.Linear(channels, 1), nn.Flatten(0))


def attached(model: nn.Module, **options: Any) -> BatchClipper:
    clipper = Batch(1.0, running_statistics=NoisedStatistics(**options)).attach(site(model))
    assert isinstance(clipper, BatchClipper)
    return clipper


# What is clipped


def test_the_vector_by_hand() -> None:
    """u and w as the docstring has them, below the clip."""
    layer, model = alone()
    layer.running_mean.copy_(torch.tensor([0.0, 1.0, -1.0]))
    layer.running_var.copy_(torch.tensor([1.0, 4.0, 0.25]))
    clipper = attached(model, max_norm=10.0)
    a = torch.tensor([[0.5, 1.5, -1.1], [0.3, 3.0, -0.8], [-0.9, -1.0, -1.2]])
    found = clipper.clipped_sum(model(a))["statistics of 0"]
    eps, expected_u, expected_w = layer.eps, [], []
    for column, mu, v in zip(a.double().T.tolist(), [0.0, 1.0, -1.0], [1.0, 4.0, 0.25], strict=True):
        expected_u.append(sum(x - mu for x in column) / 3 / math.sqrt(v + eps))
        expected_w.append((sum((x - mu) ** 2 for x in column) / 3 + eps) / (v + eps) - 1)
    assert found.tolist() == pytest.approx(expected_u + expected_w, rel=1e-5)


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 6), (2, 3, 4, 4)])
def test_all_positions_count(shape: tuple[int, ...]) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    model = nn.Sequential(without_running_statistics(kind(3)), nn.Flatten(), nn.LazyLinear(1), nn.Flatten(0))
    x = torch.randn(shape) * 0.7
    model(x)  # makes the lazy layer
    u_w = attached(model, max_norm=100.0).clipped_sum(model(x))["statistics of 0"]
    rows = x.transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(u_w[:3], rows.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(u_w[3:], rows.square().mean(1) - 1, rtol=1e-4, atol=1e-4)


def test_a_layer_used_twice_counts_every_value_once() -> None:
    layer, _ = alone(1)
    model = nn.Sequential(layer, nn.Linear(1, 1), nn.Flatten(0))
    clipper = attached(model, max_norm=10.0)
    losses = torch.cat([model(torch.full((6, 1), 0.5)), model(torch.full((2, 1), -0.5))])
    u, w = clipper.clipped_sum(losses)["statistics of 0"].tolist()
    assert u == pytest.approx((6 * 0.5 - 2 * 0.5) / 8, rel=1e-4)
    assert w == pytest.approx(0.25 - 1, rel=1e-3)


@QUICK
@given(
    st.floats(1e-3, 20.0),
    st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e6, 1e18, 1e30, math.inf, math.nan]),
    st.integers(0, 10**6),
)
def test_no_vector_is_longer_than_the_bound(bound: float, scale: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    model = network()
    clipper = attached(model, max_norm=bound)
    x = torch.randn(6, 3, generator=random)
    x[0] *= scale
    for name, vector in clipper.clipped_sum(model(x)).items():
        if name.startswith("statistics"):
            assert vector.dtype == torch.float64 and bool(vector.isfinite().all())
            assert float(vector.norm()) <= bound
            assert float(vector.abs().max()) <= 1


def test_an_empty_microbatch_adds_zeros_of_the_same_shape() -> None:
    model = network()
    clipper = attached(model)
    ordinary, empty = clipper.clipped_sum(model(torch.randn(4, 3))), clipper.clipped_sum(torch.zeros(0))
    assert ordinary.keys() == empty.keys()
    assert all(empty[n].shape == v.shape and empty[n].dtype == v.dtype for n, v in ordinary.items())
    assert not any(bool(v.any()) for v in empty.values())


def test_a_gradient_that_is_not_finite_does_not_take_the_statistics_with_it() -> None:
    _, model = alone()
    clipper = attached(model)
    found = clipper.clipped_sum(model(torch.ones(4, 3)) * math.inf)
    assert not any(bool(found[n].any()) for n in trainable(model))
    assert bool(found["statistics of 0"].any())


# What is learned


def test_one_update_by_hand() -> None:
    layer, model = alone(2)
    layer.running_mean.copy_(torch.tensor([1.0, -2.0]))
    layer.running_var.copy_(torch.tensor([4.0, 0.5]))
    clipper = attached(model, momentum=0.25)
    released = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    released["statistics of 0"] = torch.tensor([0.2, -0.4, 0.8, -1.2]).double()
    assert not clipper.learn(released)  # no bound has changed
    eps = layer.eps
    mean = [1 + 0.25 * 0.2 * math.sqrt(4 + eps), -2 - 0.25 * 0.4 * math.sqrt(0.5 + eps)]
    var = [(4 + eps) * math.exp(0.2) - eps, (0.5 + eps) * math.exp(-0.3) - eps]
    assert layer.running_mean.tolist() == pytest.approx(mean, rel=1e-6)
    assert layer.running_var.tolist() == pytest.approx(var, rel=1e-6)
    assert int(layer.num_batches_tracked) == 1 and layer.has_statistics


def test_parts_that_hold_some_of_the_vectors_do_not_speed_up_the_statistics() -> None:
    """With a random layer the divisor is that of one part, and every vector takes part in the statistics."""
    found = []
    for parts in ("all", RandomLayer()):
        layer, model = alone(2)
        strategy = Batch(1.0, microbatches=4, parts=parts, running_statistics=NoisedStatistics())
        clipper = strategy.attach(site(model))
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        total["statistics of 0"] = torch.tensor([0.2, -0.4, 0.8, -1.2]).double()
        clipper.learn({name: t / clipper.divisor for name, t in total.items()})
        found.append(torch.cat([layer.running_mean, layer.running_var]))
    torch.testing.assert_close(*found)


@QUICK
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), min_size=4, max_size=4))
def test_whatever_is_released_the_variance_stays_positive_and_finite(values: list[float]) -> None:
    layer, model = alone(2)
    clipper = attached(model, momentum=1.0)
    released = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for _ in range(30):
        clipper.learn({**released, "statistics of 0": torch.tensor(values, dtype=torch.float64)})
    assert bool((layer.running_var >= layer.eps * (1 - 1e-6)).all())
    assert bool(layer.running_var.isfinite().all() and layer.running_mean.isfinite().all())


@pytest.mark.slow
def test_without_noise_it_finds_the_statistics_that_public_data_would_give() -> None:
    """Of every layer, the later ones too. Centre and scale of the data are far from where the buffers begin."""
    torch.manual_seed(1)
    model = network()
    clipper = attached(model, max_norm=100.0, momentum=0.2)
    x = torch.randn(4000, 3) * torch.tensor([0.1, 3.0, 20.0]) + torch.tensor([5.0, -3.0, 0.0])
    for step in range(400):
        rows = x[torch.arange(200) + 200 * (step % 20)]
        clipper.learn(clipper.clipped_sum(model(rows)))
    inner = x
    for module in model:
        if isinstance(module, BatchStatisticsNorm):
            torch.testing.assert_close(module.running_mean, inner.mean(0), rtol=0.1, atol=0.1)
            torch.testing.assert_close(module.running_var, inner.var(0), rtol=0.15, atol=0.0)
        inner = module(inner)


def test_a_dead_channel_comes_to_rest() -> None:
    """Its variance falls to eps and its deviation to 0, so it does not use up the clipping norm permanently."""
    layer, model = alone(1)
    clipper = attached(model, max_norm=1.0, momentum=0.5)
    for _ in range(100):
        clipper.learn(clipper.clipped_sum(model(torch.full((4, 1), 2.0))))
    assert float(clipper.clipped_sum(model(torch.full((4, 1), 2.0)))["statistics of 0"].norm()) < 1e-2
    assert float(layer.running_mean) == pytest.approx(2.0, abs=1e-2)
    assert float(layer.running_var) == pytest.approx(layer.eps, rel=0.1)


def test_a_forward_pass_changes_nothing() -> None:
    model = network()
    clipper = attached(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    clipper.clipped_sum(model(torch.randn(4, 3) * 50))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# Parts and their noise


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_parts_have_the_size_of_their_vectors(adjacency: Adjacency) -> None:
    model = network()
    strategy = Batch(1.0, running_statistics=NoisedStatistics(0.3, share=0.2))
    found = strategy.attach(site(model, adjacency)).bounds
    assert [(b.name, b.parameters, b.sensitivity, b.size) for b in found[1:]] == [
        ("statistics of 1", (), 0.6, 8),
        ("statistics of 4", (), 0.6, 10),
    ]


@QUICK
@given(
    st.lists(st.tuples(st.floats(1e-2, 1e2), st.integers(1, 4000)), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(1e-2, 1e2), st.integers(1, 400)), min_size=1, max_size=4),
    st.floats(0.05, 20.0),
    st.floats(0.001, 0.9),
    st.sampled_from(["optimal", "equal"]),
)
def test_the_noise_of_each_part_by_a_formula_of_its_own(
    main: list[tuple[float, int]], beside: list[tuple[float, int]], z: float, share: float, split: str
) -> None:
    bounds = [Bound(f"g{k}", (f"g{k}",), S) for k, (S, _) in enumerate(main)]
    bounds += [Bound(f"s{k}", (), S, size=d, share=share) for k, (S, d) in enumerate(beside)]
    on = {f"g{k}": nn.Parameter(torch.zeros(d)) for k, (_, d) in enumerate(main)}
    parts = noised_parts(bounds, on, z, split, 10.0)
    assert z <= effective_multiplier(parts) <= z * (1 + 1e-9)
    used = {kind: sum((p.sensitivity / p.noise_std) ** 2 for p in parts if p.name[0] == kind) for kind in "gs"}
    assert used["s"] == pytest.approx(share / z**2, rel=1e-9)
    assert used["g"] == pytest.approx((1 - share) / z**2, rel=1e-9)
    stds = [p.noise_std for p in parts if p.name[0] == "s"]
    for (S, d), std in zip(beside, stds, strict=True):
        if split == "equal":
            expected = z / math.sqrt(share) * math.sqrt(len(beside)) * S
        else:
            total = sum(s * math.sqrt(n) for s, n in beside)
            expected = z / math.sqrt(share) * math.sqrt(S * total / math.sqrt(d))
        assert std == pytest.approx(expected, rel=1e-9)


def test_weights_of_the_noise_are_for_the_parts_of_the_gradient() -> None:
    model = nn.Sequential(*network())
    parts = {"left": ["0", "1"], "right": ["3", "4", "5"]}
    strategy = Batch(1.0, parts=parts, split={"left": 1.0, "right": 2.0}, running_statistics=NoisedStatistics())
    clipper = strategy.attach(site(model))
    found = noised_parts(clipper.bounds, trainable(model), 1.5, strategy.split, clipper.divisor)
    assert effective_multiplier(found) == pytest.approx(1.5, rel=1e-9)
    assert found[0].noise_std == pytest.approx(2 * found[1].noise_std)


def test_without_a_rule_there_is_nothing_beside_the_gradient() -> None:
    model = network()
    clipper = Batch(1.0).attach(site(model))
    assert len(clipper.bounds) == 1
    assert clipper.clipped_sum(model(torch.randn(4, 3))).keys() == trainable(model).keys()
    assert LayerStatistics(None, site(model), 1.0).bounds == ()


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "max_norm must be a finite number that is greater than 0"),
        ({"max_norm": math.nan}, "max_norm must be a finite number that is greater than 0"),
        ({"momentum": -0.1}, "momentum must be a finite number that is greater than 0"),
        ({"momentum": 1.5}, "momentum must be .* at most 1, not 1.5"),
        ({"share": 1.0}, "share must be .* less than 1, not 1.0"),
        ({"share": True}, "share must be a finite number that is greater than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"NoisedStatistics: {message}"):
        NoisedStatistics(**options)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="running_statistics must be NoisedStatistics"):
        Batch(1.0, running_statistics=0.1)  # type: ignore[arg-type]


def test_a_local_update_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="local_update runs on a copy"):
        Batch(1.0, local_update=lambda model, microbatch: None, running_statistics=NoisedStatistics())


@pytest.mark.parametrize("kind", ["none", "frozen"])
def test_a_model_without_such_layers_is_refused(kind: str) -> None:
    model = nn.Linear(3, 1) if kind == "none" else network().eval()
    with pytest.raises(ConfigurationError, match="found no layer"):
        attached(model)


def test_a_frozen_layer_stays_as_it_is() -> None:
    model = network()
    model[1].eval()
    clipper = attached(model)
    assert [b.name for b in clipper.bounds[1:]] == ["statistics of 4"]
    assert not model[1].is_observed


def test_a_layer_that_left_training_mode_is_an_error_by_name() -> None:
    model = network()
    clipper = attached(model)
    model[4].eval()
    with pytest.raises(StepError, match=r"'statistics of 4' is in .eval\(\).*model.train\(\)"):
        clipper.clipped_sum(model(torch.randn(4, 3)))


def test_a_layer_that_takes_no_part_is_an_error_by_name() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, _ = alone(3)
            self.idle = BatchStatisticsNorm(3, affine=False)
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.used(x)).squeeze(1)
            return result

    model = Skips()
    clipper = attached(model)
    with pytest.raises(UnsupportedModelError, match="'statistics of idle' is not in the graph of the losses"):
        clipper.clipped_sum(model(torch.randn(4, 3)))
