"""Per-example clipping: what is accepted, what is stated, what each mode does to a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipwise.clipping import Clipper, PerExample
from clipwise.errors import ConfigurationError
from clipwise.gradients import METHODS
from clipwise.privacy import Adjacency
from tests.gradients.cases import losses, oracle, trainable
from tests.sites import site

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
BAD_NORMS = [0, 0.0, -1, -1e-9, math.nan, math.inf, -math.inf, True, False, "1", None, torch.tensor(1.0)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def attached(strategy: PerExample, on: nn.Module, adjacency: Adjacency = Adjacency.ZERO_OUT) -> Clipper:
    return strategy.attach(site(on, adjacency))


@pytest.mark.parametrize("norm", BAD_NORMS, ids=repr)
def test_max_norm_must_be_a_positive_number(norm: object) -> None:
    for given_norm in (norm, {"0": 1.0, "2": norm}):
        with pytest.raises(ConfigurationError, match="max_norm"):
            PerExample(max_norm=given_norm, parts="layer")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "argument", [{"mode": "clamp"}, {"method": "magic"}, {"split": "half"}, {"mode": None}, {"method": ""}]
)
def test_unknown_choices_are_refused_with_the_known_ones(argument: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(argument))}=.*use one of '"):
        PerExample(**argument)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parts", ["both", [["0"]], [["0", "2"], ["2.bias"]], [["0", "2", "7"]], [["0", "2"], []]], ids=repr
)
def test_parts_that_do_not_fit_the_model_are_refused(parts: object) -> None:
    with pytest.raises(ConfigurationError, match="parts"):
        attached(PerExample(parts=parts), model())  # type: ignore[arg-type]


def test_one_norm_a_part() -> None:
    clipper = attached(PerExample({"0": 1.0, "2": 3.0}, parts="layer"), model())
    assert {b.name: b.sensitivity for b in clipper.bounds} == {"0": 1.0, "2": 3.0}
    with pytest.raises(ConfigurationError, match="'0', '2'"):
        attached(PerExample({"0": 1.0}, parts="layer"), model())


@pytest.mark.parametrize(
    ("parts", "count"), [("all", 1), ("layer", 2), ("tensor", 4), ([["0.weight"], ["0.bias", "2"]], 2)]
)
def test_sensitivities_are_stated_for_the_adjacency(parts: object, count: int) -> None:
    strategy = PerExample(max_norm=1.5, parts=parts)  # type: ignore[arg-type]
    zero_out, replace = (attached(strategy, model(), a) for a in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE))
    assert len(zero_out.bounds) == count
    for one, two in zip(zero_out.bounds, replace.bounds, strict=True):
        assert math.isclose(one.sensitivity, 1.5 / math.sqrt(count))
        assert two.sensitivity == 2 * one.sensitivity  # one clipped gradient replaces another
    held = [name for b in zero_out.bounds for name in b.parameters]
    assert sorted(held) == sorted(trainable(model()))


def test_method_is_no_part_of_the_configuration() -> None:
    """It changes no result, so a run may continue with another one."""
    assert PerExample(method="loop").describe() == PerExample().describe()
    assert PerExample(mode="normalize").describe() != PerExample().describe()


# What clipping does: the sum, from the definition


def by_definition(strategy: PerExample, on: nn.Module, x: Tensor) -> dict[str, Tensor]:
    truth = oracle(on, (x,))
    total = {}
    for bound in attached(strategy, on).bounds:
        norms = torch.stack([truth[n].flatten(1).norm(dim=1) for n in bound.parameters]).norm(dim=0)
        C = bound.sensitivity
        nu = (C / norms).clamp(max=1) if strategy.mode == "clip" else C / (norms + 0.01 * C)
        total.update({n: torch.einsum("b,b...->...", nu, truth[n]) for n in bound.parameters})
    return total


@QUICK
@given(
    st.sampled_from(["clip", "normalize"]),
    st.sampled_from(["all", "layer", "tensor", [["0.weight", "2.bias"], ["0.bias", "2.weight"]]]),
    st.sampled_from(METHODS),
    st.floats(1e-3, 1e3),
    st.integers(1, 6),
)
def test_the_sum_is_that_of_the_definition(mode: str, parts: object, method: str, C: float, B: int) -> None:
    on, x = model(), torch.randn(B, 4, dtype=torch.float64)
    strategy = PerExample(C, parts, mode=mode, method=method)  # type: ignore[arg-type]
    found = attached(strategy, on).clipped_sum(losses(on, (x,)))
    for name, expected in by_definition(strategy, on, x).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-8 * C)


@QUICK
@given(st.floats(-300, 100), st.floats(-5, 5))
def test_normalize_comes_close_to_the_bound_and_never_above(gradient: float, bound: float) -> None:
    """|g| C / (|g| + 0.01 C) < C; within 1 % of C for gradients as long as C, and 0 for a gradient of 0."""
    C, scale = 10.0**bound, 10.0**gradient
    on = nn.Linear(3, 1, bias=False).double()
    x = torch.tensor([[1.0, -2.0, 2.0]], dtype=torch.float64)
    total = attached(PerExample(C, mode="normalize"), on).clipped_sum(on(x)[:, 0] * scale)
    length, true = float(total["weight"].norm()), 3 * scale
    assert length <= C
    if C <= true < 1e37 * C:  # (1e38 times longer than C counts as 0)
        assert length >= C / 1.0101
    if true < 1e-100:
        assert length <= 1e-90 * max(1, C)


def test_clip_leaves_short_gradients_as_they_are() -> None:
    on, x = model(), torch.randn(5, 4, dtype=torch.float64)
    found = attached(PerExample(max_norm=1e6), on).clipped_sum(losses(on, (x,)))
    for name, g in oracle(on, (x,)).items():
        torch.testing.assert_close(found[name], g.sum(0))


def test_an_empty_batch_releases_nothing_but_noise() -> None:
    on = model()
    total = attached(PerExample(), on).clipped_sum(losses(on, (torch.randn(1, 4).double(),))[:0])
    assert {n: t.shape for n, t in total.items()} == {n: p.shape for n, p in trainable(on).items()}
    assert not any(t.any() for t in total.values())


def test_no_gradient_is_written_to_the_model() -> None:
    on = model()
    attached(PerExample(), on).clipped_sum(losses(on, (torch.randn(3, 4).double(),)))
    assert all(p.grad is None for p in on.parameters())
