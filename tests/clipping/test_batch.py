"""Batch clipping: what is accepted, what is stated, what is made of a gradient."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise import Batch
from clipwise.clipping import BatchClipper, PerExample, Quantile, batch
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.privacy import Adjacency, Sampling, Unit
from clipwise.sampling.schemes import make_scheme
from tests.sites import site

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def attached(strategy: Batch, on: nn.Module, *where: Any) -> BatchClipper:
    clipper = strategy.attach(site(on, *where))
    assert isinstance(clipper, BatchClipper)
    return clipper


def losses(on: nn.Module, rows: int = 6, scale: float = 100.0) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return on(torch.randn(rows, 4, generator=random).double()).square().sum(1) * scale


def norm(vectors: dict[str, Tensor]) -> float:
    return math.hypot(*(float(v.double().norm()) for v in vectors.values()))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", None], ids=repr)
def test_max_norm_must_be_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_norm"):
        Batch(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None], ids=repr)
def test_microbatches_must_be_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="microbatches"):
        Batch(1.0, microbatches=value)


def test_other_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="split='half' is not known"):
        Batch(split="half")
    with pytest.raises(ConfigurationError, match="local_update must be a function"):
        Batch(local_update=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Batch does not support max_norm=Quantile"):
        attached(Batch(Quantile()), model())
    with pytest.raises(ConfigurationError, match="parts"):
        attached(Batch(parts="both"), model())


def test_the_configuration_is_json_and_distinguishes_runs() -> None:
    def update(model: nn.Module, microbatch: Any) -> None: ...

    every = [
        Batch(),
        Batch(2.0),
        Batch(microbatches=2),
        Batch(parts="layer"),
        Batch(split="equal"),
        Batch(local_update=update),
        Batch(local_update=partial(print)),  # type: ignore[arg-type]
        Batch(NormDecay(1.0, 0.5)),
    ]
    described = [json.dumps(s.describe(), sort_keys=True) for s in every]
    assert len(set(described)) == len(every)
    assert "update" in described[5] and "0x" not in described[5]


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("k", [1, 5, 501, 1000])  # of 501 microbatches most have two records, and some have one
def test_the_sensitivity_of_every_unit(adjacency: Adjacency, unit: Unit, k: int) -> None:
    """2 C for a record among others; C under zero-out if the unit is the microbatch."""
    clipper = attached(Batch(3.0, k), model(), adjacency, unit)
    alone = unit is not Unit.RECORD or k == 1000  # the site has a thousand records
    assert clipper.bounds[0].sensitivity == (3.0 if alone and adjacency is Adjacency.ZERO_OUT else 6.0)


def test_the_divisor_is_the_expected_number_of_microbatches() -> None:
    """Ten records are expected; a batch never has more microbatches than records."""
    assert [attached(Batch(1.0, k), model()).divisor for k in (1, 5, 10, 1000)] == [1, 5, 10, 10]
    assert attached(Batch(), model(), Adjacency.ZERO_OUT, Unit.USER).divisor == 10
    assert attached(Batch(1.0, 4, parts=RandomLayer()), model()).divisor == 4 / 2


@pytest.mark.parametrize("scale", [100.0, 1e-3])
def test_the_mean_gradient_is_clipped(scale: float) -> None:
    on = model()
    clipper = attached(Batch(0.5), on)
    expected = torch.autograd.grad(losses(on, scale=scale).mean(), list(on.parameters()))
    length = math.hypot(*(float(g.norm()) for g in expected))
    found = clipper.clipped_sum(losses(on, scale=scale))
    single = clipper.clipped_sum(losses(on, scale=scale).mean())
    for (name, v), g in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(v, g * min(1.0, 0.5 / length), rtol=1e-11, atol=0.0)
        assert torch.equal(v, single[name])
    assert (norm(found) == pytest.approx(0.5, rel=1e-11)) == (scale == 100.0)
    assert norm(found) <= 0.5


def test_each_part_has_a_bound_of_its_own() -> None:
    on = model()
    clipper = attached(Batch({"0": 0.1, "2": 7.0}, parts="layer"), on)
    found = clipper.clipped_sum(losses(on))
    for part, C in {"0": 0.1, "2": 7.0}.items():
        length = norm({n: v for n, v in found.items() if n.startswith(part)})
        assert length <= C and length == pytest.approx(C, rel=2e-6)


def test_no_example_adds_nothing() -> None:
    on = model()
    for strategy in (Batch(), Batch(1.0, 3, "layer")):
        assert norm(attached(strategy, on).clipped_sum(losses(on, rows=0))) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_adds_nothing(bad: float) -> None:
    on = model()
    values = losses(on)
    values = values * torch.tensor([1.0, 1.0, bad, 1.0, 1.0, 1.0])
    assert norm(attached(Batch(parts="layer"), on).clipped_sum(values)) == 0


def test_a_parameter_without_a_part_is_named() -> None:
    on = model()
    on.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModelError, match="'idle' take no part in the losses"):
        attached(Batch(), on).clipped_sum(losses(on))


def test_sparse_gradients() -> None:
    on = nn.Embedding(5, 3, sparse=True)
    found = attached(Batch(0.5), on).clipped_sum(on(torch.tensor([1, 1, 2])).sum(1) * 100)
    assert norm(found) == pytest.approx(0.5, rel=2e-6)


@QUICK
@given(
    st.floats(1e-12, 1e12),
    st.sampled_from([1e-42, 1e-30, 1e-5, 1.0, 1e5, 1e18, 1e30, 3e37]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(1, 400),
    st.sampled_from([1, 7]),
    st.integers(0, 10**6),
)
def test_rounding_never_passes_the_bound(
    C: float, scale: float, dtype: torch.dtype, size: int, k: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    on = {"w": nn.Parameter(torch.zeros(size, dtype=dtype))}
    clipper = Batch(C, k).attach(site(on))
    values = (torch.randn(size, generator=random, dtype=torch.float64) * scale).to(dtype)
    found = clipper.clipped_sum((on["w"] * values).sum())
    assert float(found["w"].double().norm()) <= C


@pytest.mark.parametrize("value", [1e-200, 1.0, 1e20, 1e45, 1e150])
def test_changes_in_float64_of_parameters_in_float32(value: float) -> None:
    """What float32 cannot hold is clipped before it is rounded."""
    on = {"w": nn.Parameter(torch.zeros(300))}
    change = torch.full((300,), value, dtype=torch.float64)
    found = Batch(2.0, local_update=lambda m, s: {"w": change}).attach(site(on)).clipped_update(None)
    assert found["w"].dtype == torch.float32
    assert norm(found) <= 2
    if value <= 1e20:
        assert norm(found) == pytest.approx(min(2.0, value * 300**0.5), rel=2e-6, abs=1e-40)


def test_weights_that_float32_holds_in_part_count_as_0() -> None:
    """C / |g| is 1.6 2^-149 here, and float32 would have 2 or 1 of that."""
    C, value = 1.6 * 2.0**-22, 2.0**127
    on = {"w": nn.Parameter(torch.zeros(1))}
    found = Batch(C).attach(site(on)).clipped_sum((on["w"] * value).sum())
    assert float(found["w"]) == 0
    wide = {"w": nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    found = Batch(C).attach(site(wide)).clipped_sum((wide["w"] * value).sum())
    assert C * (1 - 1e-6) < float(found["w"]) <= C  # float64 holds it


def test_a_weight_and_a_product_are_rounded_within_the_margin() -> None:
    """In float32 both may round up; a margin for only one of them would be exceeded (found by search)."""
    C, value = 0.531545636702378, 52.785825575463925
    on = {"w": nn.Parameter(torch.zeros(1))}
    found = Batch(C).attach(site(on)).clipped_sum((on["w"] * value).sum())
    assert float(found["w"]) <= C
    assert batch._MARGIN >= 4 * 2.0**-23  # in the worst case they take 2^-23 together


def test_changes_in_float32_of_parameters_in_float64() -> None:
    """The margin covers the rounding of float64 only."""
    on = {"w": nn.Parameter(torch.zeros(300, dtype=torch.float64))}
    for seed in range(20):
        change = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        clipper = Batch(1.0, local_update=lambda m, s, change=change: {"w": change}).attach(site(on))
        found = clipper.clipped_update(None)
        assert found["w"].dtype == torch.float64 and 1 - 1e-9 < norm(found) <= 1


def test_a_part_of_two_types_has_the_margin_of_the_coarser_one() -> None:
    for seed in range(10):
        random = torch.Generator().manual_seed(seed)
        on = {"a": nn.Parameter(torch.zeros(300)), "b": nn.Parameter(torch.zeros(2, dtype=torch.float64))}
        values = torch.randn(300, generator=random)
        found = Batch(1.0).attach(site(on)).clipped_sum((on["a"] * values).sum() + on["b"].sum())
        assert found["a"].dtype == torch.float32
        assert norm(found) <= 1


@pytest.mark.parametrize(("size", "unit"), [(10**6, Unit.RECORD), (2, Unit.USER)], ids=str)
def test_in_float64_the_margin_covers_long_sums(size: int, unit: Unit) -> None:
    """d u for the squares of a norm, k^2 u for the sum of k users: the site has a thousand of them."""
    on = {"w": nn.Parameter(torch.zeros(size, dtype=torch.float64))}
    found = Batch(1.0).attach(site(on, Adjacency.ZERO_OUT, unit)).clipped_sum(on["w"].sum() * 100)
    assert 1 - 2e-10 < norm(found) < 1 - 1e-10  # 10^6 u is 1.1e-10


@pytest.mark.parametrize(
    ("k", "unit", "dtype"),
    [(1, Unit.RECORD, torch.float32), (2, Unit.RECORD, torch.float64), (1, Unit.USER, torch.float64)],
    ids=str,
)
def test_several_vectors_are_summed_in_float64(k: int, unit: Unit, dtype: torch.dtype) -> None:
    """In float32 the sum of many would be rounded at its own scale, again and again."""
    on = model().float()
    clipper = attached(Batch(1.0, k), on, Adjacency.ZERO_OUT, unit)
    for found in (clipper.clipped_sum(on(torch.ones(3, 4)).square().sum(1)), clipper.nothing()):
        assert {v.dtype for v in found.values()} == {dtype}


def test_one_random_layer_a_microbatch() -> None:
    on = model()
    clipper = attached(Batch(0.5, parts=RandomLayer()), on)
    assert clipper.draws
    seen = set()
    for secret in range(20):
        clipper.secret = bytes([secret])
        found = clipper.clipped_sum(losses(on))
        there = {name[0] for name, v in found.items() if bool(v.any())}
        assert len(there) == 1 and norm(found) == pytest.approx(0.5, rel=2e-6)
        seen |= there
    assert seen == {"0", "2"}


# Local updates


def test_the_copy_is_trained_and_its_change_is_clipped() -> None:
    on = model()
    before = {name: p.detach().clone() for name, p in on.named_parameters()}

    def update(copied: nn.Module, rows: Tensor) -> None:
        assert copied is not on
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            copied(rows).square().mean().backward()
            optimizer.step()

    rows = torch.randn(5, 4).double()
    copied = model()
    update(copied, rows)
    expected = {n: before[n] - p.detach() for n, p in copied.named_parameters()}
    free = attached(Batch(1e6, local_update=update), on).clipped_update(rows)
    bound = attached(Batch(1e-3, local_update=update), on).clipped_update(rows)
    for name, v in expected.items():
        torch.testing.assert_close(free[name], v)
        torch.testing.assert_close(bound[name], v * 1e-3 / norm(expected), rtol=2e-6, atol=0.0)
        assert torch.equal(before[name], dict(on.named_parameters())[name])
    assert all(p.grad is None for p in on.parameters())


def test_a_returned_change_is_taken_by_name() -> None:
    on = model()
    change = {"0.bias": torch.tensor([3.0, 0.0, 4.0])}
    found = attached(Batch(100.0, local_update=lambda m, s: change), on).clipped_update(None)
    assert torch.equal(found["0.bias"], -change["0.bias"].double())
    assert norm(found) == 5.0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (3, "mapping.*not int"),
        ({"nope": torch.zeros(1)}, "'nope'.*not a trainable parameter"),
        ({"0.bias": torch.zeros(2)}, r"'0.bias'.*shape \(3,\)"),
        ({"0.bias": [1, 2, 3]}, "'0.bias'"),
        ({"0.bias": torch.zeros(3, dtype=torch.long)}, "'0.bias'"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(answer: Any, words: str) -> None:
    with pytest.raises(StepError, match=words):
        attached(Batch(local_update=lambda m, s: answer), model()).clipped_update(None)


@pytest.mark.parametrize("change", [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_changes_that_hold_no_plain_numbers_are_refused(change: Tensor) -> None:
    clipper = attached(Batch(1.0, local_update=lambda m, s: {"0.bias": change}), model())
    with pytest.raises(StepError, match=r"'0.bias'.*dense tensor"):
        clipper.clipped_update(None)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    on = model()
    on.kept = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="cannot be copied"):
        attached(Batch(local_update=lambda m, s: None), on).clipped_update(None)


def test_other_strategies_stay_uncoupled() -> None:
    assert Batch().is_coupled and not PerExample().is_coupled


def test_sums_that_could_be_rounded_by_half_of_the_bound_are_refused() -> None:
    """k vectors that are no longer than C are off by k^2 / 2 u C, in float64: at 10^8 users that is all of C."""
    model = nn.Linear(2, 1).double()
    of_many = replace(site(model), unit=Unit.USER, scheme=make_scheme(Sampling.POISSON, 10**8, batch_size=10))
    with pytest.raises(ConfigurationError, match="float32"):
        Batch(1.0).attach(of_many)
    assert Batch(1.0).attach(replace(of_many, parameters=dict(nn.Linear(2, 1).named_parameters())))
