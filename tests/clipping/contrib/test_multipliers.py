"""Layers that are scaled before one clip: the factors, what they cost, and how they compare with bounds per layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import PerExample
from clipwise.clipping import noised_parts
from clipwise.clipping.contrib.policies import Adaptive, Multipliers, multipliers
from clipwise.clipping.contrib.typical import ReleasedNorms, mean_norms
from clipwise.errors import ConfigurationError
from tests.clipping.contrib.test_adaptive import LAYERS, known
from tests.clipping.policies import public, rows, small_model
from tests.gradients.cases import losses, oracle, trainable
from tests.runs import data, gradients, losses_of, network, private_run
from tests.sites import site

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
layers = st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 100_000)), min_size=1, max_size=8)


def noise_energy(m: dict[str, float], e: dict[str, float], d: dict[str, int]) -> float:
    """(sum m^2 e^2) (sum d / m^2): for a bound in proportion to the scaled typical gradient."""
    return math.fsum((m[h] * e[h]) ** 2 for h in e) * math.fsum(d[h] / m[h] ** 2 for h in e)


def unzip(found: list[tuple[float, int]]) -> tuple[dict[str, float], dict[str, int]]:
    return {str(h): e for h, (e, _) in enumerate(found)}, {str(h): d for h, (_, d) in enumerate(found)}


@QUICK
@given(layers, st.sampled_from(["optimal", "paper"]))
def test_keep_length_keeps_the_norm_of_the_typical_gradient(found: list[tuple[float, int]], kind: str) -> None:
    """By one number for all layers."""
    e, d = unzip(found)
    m, printed = multipliers(e, d, kind, keep_length=True), multipliers(e, d, kind)
    assert [m[h] / printed[h] for h in e] == pytest.approx([m["0"] / printed["0"]] * len(e))
    assert math.hypot(*(m[h] * e[h] for h in e)) == pytest.approx(math.hypot(*e.values()))


def test_the_factors_are_those_that_are_printed() -> None:
    """max e / e_h and (sqrt(d_h) / e_h)^(1/2), in the sum as well: no other number beside them."""
    e, d = {"a": 0.5, "b": 2.0}, {"a": 16, "b": 64}
    assert multipliers(e, d, "paper") == {"a": 4.0, "b": 1.0}
    assert multipliers(e, d, "optimal") == pytest.approx({"a": math.sqrt(8), "b": 2.0})
    on = small_model()
    e = mean_norms(public(), on, trainable(on), LAYERS, "example", None)
    (bound,) = PerExample(0.9, Multipliers(public(), kind="paper")).attach(site(on)).bounds
    scales = dict(zip(bound.parameters, bound.scales, strict=True))
    for h, names in LAYERS.items():
        assert [scales[n] for n in names] == pytest.approx([max(e.values()) / e[h]] * len(names))


def test_how_long_a_scaled_gradient_is_belongs_to_the_configuration() -> None:
    assert Multipliers(public()).describe()["keep_length"] is False
    assert Multipliers(public(), keep_length=True).describe()["keep_length"] is True
    assert Multipliers(ReleasedNorms()).describe()["keep_length"] is True  # ratios do not give a norm
    assert Multipliers(ReleasedNorms(), kind="paper").describe()["keep_length"] is False  # no norm is needed


@QUICK
@given(layers, st.lists(st.floats(0.1, 10), min_size=8, max_size=8))
def test_optimal_has_the_least_noise_for_typical_norms(found: list[tuple[float, int]], other: list[float]) -> None:
    """(sum e sqrt(d))^2, below any other factors, those of the paper, and none at all."""
    e, d = unzip(found)
    optimal = multipliers(e, d, "optimal")
    least = noise_energy(optimal, e, d)
    assert least == pytest.approx(math.fsum(e[h] * math.sqrt(d[h]) for h in e) ** 2)
    perturbed = {h: optimal[h] * x for h, x in zip(e, other, strict=False)}
    for m in (multipliers(e, d, "paper"), dict.fromkeys(e, 1.0), perturbed):
        assert least <= noise_energy(m, e, d) * (1 + 1e-12)
    assert least <= len(e) * math.fsum(d[h] * e[h] ** 2 for h in e) * (1 + 1e-12)  # that of bounds per layer


@QUICK
@given(layers)
def test_paper_makes_all_layers_equally_long(found: list[tuple[float, int]]) -> None:
    e, d = unzip(found)
    m = multipliers(e, d, "paper")
    lengths = [m[h] * e[h] for h in e]
    assert min(lengths) == pytest.approx(max(lengths))


@pytest.mark.slow
@QUICK
@given(st.integers(0, 999), st.floats(0.05, 3), st.sampled_from([("paper", "equal"), ("optimal", "optimal")]))
def test_what_bounds_per_layer_leave_unclipped_it_leaves_too(seed: int, C: float, kinds: tuple[str, str]) -> None:
    """With max_norm = |C_h|, on the box |g_h| <= C_h: "paper" against an equal split, "optimal" an optimal one."""
    kind, split = kinds
    on, z = small_model(), 1.1
    box = PerExample(C, Adaptive(public()), split).attach(site(on))
    bounds = {b.name: b.sensitivity for b in box.bounds}
    scaled = Multipliers(public(), kind=kind, keep_length=True)
    flat = PerExample(math.hypot(*bounds.values()), scaled).attach(site(on))
    x = rows(1, seed)
    g = oracle(small_model(), (x,))
    longest = max(math.hypot(*(float(g[n].norm()) for n in LAYERS[h])) / bounds[h] for h in LAYERS)
    factor = (1 - 1e-9) / longest  # to the wall of the box
    ours, theirs = (c.clipped_sum(losses(on, (x,)) * factor) for c in (flat, box))
    for n in g:
        torch.testing.assert_close(theirs[n], g[n][0] * factor, rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(ours[n], g[n][0] * factor, rtol=1e-7, atol=1e-12)
    (whole,) = noised_parts(flat.bounds, trainable(on), z, split, 10.0)
    mine = {n: whole.noise_std / m for n, m in zip(whole.parameters, whole.scales, strict=True)}
    for part in noised_parts(box.bounds, trainable(on), z, split, 10.0):
        for n in part.parameters:
            assert mine[n] == pytest.approx(part.noise_std, rel=1e-9)


@pytest.mark.parametrize("kind", ["optimal", "paper"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("keep_length", [False, True])
def test_the_sum_is_that_of_the_definition(kind: str, relative: bool, keep_length: bool) -> None:
    on, x, factors = small_model(), rows(9, seed=3), torch.logspace(-1, 1, 9).double()
    e = mean_norms(public(), on, trainable(on), LAYERS, "example", None)
    d = {h: sum(trainable(on)[n].numel() for n in names) for h, names in LAYERS.items()}
    m = multipliers(e, d, kind, keep_length)
    C = 0.9 * math.hypot(*(m[h] * e[h] for h in e)) if relative else 0.9
    policy = Multipliers(public(), kind=kind, relative=relative, keep_length=keep_length)
    clipper = PerExample(0.9, policy).attach(site(on))
    assert clipper.bounds[0].sensitivity == pytest.approx(C)
    found = clipper.clipped_sum(losses(on, (x,)) * factors)
    truth = {n: torch.einsum("b,b...->b...", factors, g) for n, g in oracle(small_model(), (x,)).items()}
    scaled = torch.cat([m[h] * truth[n].flatten(1) for h, names in LAYERS.items() for n in names], 1)
    nu = (C / scaled.norm(dim=1)).clamp(max=1)
    assert 0 < int((nu < 1).sum()) < 9
    for n, g in truth.items():
        torch.testing.assert_close(found[n], torch.einsum("b,b...->...", nu, g))


def test_a_run_divides_the_noise_by_the_factors() -> None:
    """Many releases of an empty batch: what is left is noise, of s / (m L) on each coordinate."""
    clipping = PerExample(0.8, Multipliers(known(), kind="paper", every=None))
    on, private = private_run(network(), None, data(), clipping=clipping, sample_rate=1e-9, seed=2)
    (part,) = private.parts()
    collected: dict[str, list[torch.Tensor]] = {n: [] for n in part.parameters}
    for _ in range(300):
        for batch in private.loader:
            private.backward(losses_of(on, batch))
            break
        for n, g in gradients(on).items():
            collected[n].append(g.flatten())
        on.zero_grad()
    L = private._context.clipper.divisor
    for n, m in zip(part.parameters, part.scales, strict=True):
        values = torch.cat(collected[n])
        expected = part.noise_std / (m * L)
        assert abs(float(values.std()) / expected - 1) < 5 / math.sqrt(2 * len(values))
    assert max(part.scales) > 1.2 * min(part.scales)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kind": "best"}, "kind='best' is not known"), ({"every": -1}, "every=-1"), ({"of": "set"}, "of='set'")],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Multipliers: {words}"):
        Multipliers(public(), **options)


def test_typical_gradients_are_no_measure_without_public_data() -> None:
    with pytest.raises(ConfigurationError, match="Multipliers: relative=True requires norms"):
        Multipliers(ReleasedNorms(), relative=True)


def test_without_any_release_all_coordinates_are_alike() -> None:
    """Then the optimal factors are all 1, and the clip is flat."""
    (bound,) = PerExample(0.8, Multipliers(ReleasedNorms())).attach(site(small_model())).bounds
    assert bound.scales == pytest.approx((1.0,) * 6) and bound.sensitivity == 0.8
