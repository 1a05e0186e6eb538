"""Bounds that follow typical norms: their values, when they change, and that a run survives with them."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clipwise import PerExample
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive
from clipwise.clipping.contrib.typical import ReleasedNorms, floored, mean_norms
from clipwise.clipping.public import PublicData
from clipwise.errors import CheckpointError, ConfigurationError, PrivacyWarning
from clipwise.privacy import Adjacency, effective_multiplier
from tests.clipping.policies import POLICIES, loss, policy, public, rows, small_model
from tests.gradients.cases import trainable
from tests.runs import data, losses_of, network, parameters, private_run, same, train
from tests.sites import site

LAYERS = {h: [f"{h}.weight", f"{h}.bias"] for h in ("0", "2", "4")}


def known(count: int = 10) -> PublicData:
    """For the network of `private_run`, in whatever type it computes."""
    return PublicData(
        data(count, seed=9), lambda model, x, y: losses_of(model, (x.to(next(model.parameters()).dtype), y))
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "other"}, "kind='other' is not known: use one of 'enhanced', 'zhang'"),
        ({"kind": np.ones(2)}, "kind=a ndarray is not known"),
        ({"of": ["example"]}, "of=a list is not known"),
        ({"of": "batch"}, "of='batch' is not known"),
        ({"every": 0}, "every=0 is not known"),
        ({"every": "step"}, "every='step' is not known"),
        ({"every": True}, "every=True is not known"),
        ({"microbatch_size": 3}, "microbatch_size requires of='microbatch'"),
        ({"of": "microbatch", "microbatch_size": 0}, "microbatch_size must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Adaptive: {words}"):
        Adaptive(public(), **options)


def test_norms_themselves_are_not_to_be_had_from_releases() -> None:
    with pytest.raises(ConfigurationError, match="Adaptive: kind='zhang' requires norms"):
        Adaptive(ReleasedNorms(), kind="zhang")


def test_given_batches_are_the_microbatches() -> None:
    rule = Adaptive(PublicData([[rows(3)]], loss), of="microbatch", microbatch_size=2)
    with pytest.raises(ConfigurationError, match="microbatch_size: not supported with public data in batches"):
        rule.constants(1.0, site(small_model()))


def test_a_bound_for_each_part_is_refused_with_a_policy() -> None:
    for norm in ({"0": 1.0, "2": 1.0, "4": 1.0}, NormDecay({"0": 1.0, "2": 1.0, "4": 1.0}, 0.9)):
        with pytest.raises(ConfigurationError, match=r"max_norm must be a number with parts=Adaptive\(\.\.\.\)"):
            PerExample(norm, Adaptive(public())).attach(site(small_model()))


@pytest.mark.parametrize("of", ["example", "microbatch"])
@pytest.mark.parametrize("C", [0.01, 1.0, 30.0])
def test_the_bounds_are_those_of_the_definition(C: float, of: str) -> None:
    on = small_model()
    e = mean_norms(public(), on, trainable(on), LAYERS, of, None)
    assert max(e.values()) > 3 * min(e.values())
    for adjacency, factor in ((Adjacency.ZERO_OUT, 1.0), (Adjacency.REPLACE_ONE, 2.0)):
        enhanced, zhang = (
            PerExample(C, Adaptive(public(), kind=kind, of=of)).attach(site(on, adjacency))
            for kind in ("enhanced", "zhang")
        )
        for a, b in zip(enhanced.bounds, zhang.bounds, strict=True):
            assert a.name == b.name and a.parameters == tuple(LAYERS[a.name])
            assert a.sensitivity == pytest.approx(factor * C * e[a.name] / max(e.values()))
            assert b.sensitivity == pytest.approx(factor * C * e[a.name])


def test_tf32_products_widen_every_bound() -> None:
    for name in POLICIES:
        plain, tf32 = (
            PerExample(0.5, policy(name, public()), matmul_precision=matmul_precision).attach(site(small_model()))
            for matmul_precision in ("ieee", "tf32")
        )
        for a, b in zip(plain.bounds, tf32.bounds, strict=True):
            assert b.sensitivity == pytest.approx(a.sensitivity * (1 + 2**-6)) and a.scales == b.scales


def test_a_layer_without_any_gradient_keeps_a_bound() -> None:
    on = small_model()
    with torch.no_grad():
        on[4].weight.zero_()  # then no gradient reaches the layers before it
    bounds = PerExample(2.0, Adaptive(public())).attach(site(on)).bounds
    assert [b.sensitivity for b in bounds] == pytest.approx([0.002, 0.002, 2.0])


@pytest.mark.parametrize("of", ["example", "microbatch"])
def test_a_public_loss_whose_gradient_is_0_is_refused(of: str) -> None:
    """Norms are upper bounds, so a norm of 0 may be computed as a tiny number, which says nothing about the layer."""
    nothing = PublicData([(rows(8).float(),)], lambda model, x: 0 * model(x).flatten(1).sum(1))
    with pytest.raises(ConfigurationError, match="every gradient is 0"):
        PerExample(1.0, Adaptive(nothing, of=of)).attach(site(small_model().float()))


def test_public_data_without_any_gradient_is_refused_at_the_start_and_passed_over_later() -> None:
    on = small_model()
    clipper = PerExample(1.0, Adaptive(public(), every=1)).attach(site(on))
    before = clipper.bounds
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            on[4].bias.fill_(value)
        assert not clipper.learn({}) and clipper.bounds == before
        with pytest.raises(ConfigurationError, match=r"On the public data \(TensorDataset\) every gradient is 0"):
            PerExample(1.0, Adaptive(public())).attach(site(on))


@pytest.mark.parametrize(("every", "period"), [("epoch", 100), (3, 3), (1, 1), (None, None)])
def test_norms_are_measured_again_at_the_end_of_a_period(every: Any, period: int | None) -> None:
    """The site draws 10 of 1000: an epoch has 100 steps."""
    on = small_model()
    clipper = PerExample(1.0, Adaptive(public(), every=every)).attach(site(on))
    assert clipper.lasts == (math.inf if period is None else period)
    changed = []
    for step in range(1, 202):
        with torch.no_grad():
            on[4].weight *= 1.01
        if clipper.learn({}):
            changed.append(step)
            fresh = PerExample(1.0, Adaptive(public())).attach(site(on))
            assert clipper.bounds == fresh.bounds
    assert changed == [s for s in range(1, 202) if period and s % period == 0]


# A run with it


def in_a_run(name: str) -> Any:
    return policy(name, known(), every=2)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_event_stays_and_the_noise_follows(name: str, sampling: str) -> None:
    clipping = PerExample(0.8, in_a_run(name))
    on, private = private_run(clipping=clipping, noise_multiplier=0.9, sampling=sampling)
    for _ in range(6):
        assert private.noise_multiplier == 0.9 <= effective_multiplier(private.parts()) <= 0.9 * (1 + 1e-9)
        train(on, private, 1)
    assert len(private._context.ledger.history()) == 1
    json.dumps(private.state_dict()["configuration"])
    if "random" not in name and "released" not in name:  # that public data was used is stated
        assert '"public": "TensorDataset"' in json.dumps(private.statement().to_dict()["strategy"])


@pytest.mark.parametrize("name", POLICIES)
def test_pieces_of_a_batch_change_nothing_but_the_draw(name: str) -> None:
    found = []
    for most in (None, 3):
        clipping = PerExample(0.8, in_a_run(name))
        on, private = private_run(
            network(torch.float64), None, data(dtype=torch.float64), clipping=clipping, seed=3,
            max_physical_batch_size=most, noise_multiplier=0.0,
        )  # fmt: skip
        train(on, private, 4)
        found.append(parameters(on))
    if "random" in name:
        assert not same(*found)
    else:
        for n, value in found[0].items():
            torch.testing.assert_close(found[1][n], value)


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_that_is_resumed_continues_exactly(name: str, tmp_path: Path) -> None:
    def begun(ledger: str, seed: int = 0) -> tuple[nn.Module, Any]:
        clipping = PerExample(NormDecay(0.8, 0.9, every=3), in_a_run(name))
        return private_run(network(seed=seed), clipping=clipping, seed=4, ledger=tmp_path / ledger)

    whole, private = begun("whole")
    train(whole, private, 9)
    on, first = begun("halves")
    train(on, first, 5)
    model_state, state = on.state_dict(), first.state_dict()
    first.close()
    stated = [(p.name, p.parameters, p.sensitivity, p.noise_std, p.scales) for p in first.parts()]
    again, second = begun("halves", seed=8)  # measured at other weights before the old ones are loaded
    again.load_state_dict(model_state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        second.load_state_dict(state)
    assert [(p.name, p.parameters, p.sensitivity, p.noise_std, p.scales) for p in second.parts()] == stated
    train(again, second, 4)
    assert same(parameters(whole), parameters(again))


@pytest.mark.parametrize(
    "damage",
    [
        {"typical": None},
        {"typical": {"0": 1.0}},
        {"typical": {"0": 1.0, "2": 0.0, "4": 1.0}},
        {"typical": {"0": 1.0, "2": float("nan"), "4": 1.0}},
        {"releases": None},
        {"releases": -1},
    ],
    ids=repr,
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    clipper = PerExample(1.0, Adaptive(public())).attach(site(small_model()))
    good = clipper.state_dict()
    assert clipper.load_state_dict(good)
    with pytest.raises(CheckpointError, match="damaged"):
        clipper.load_state_dict(good | damage)


def test_norms_that_float32_cannot_work_with_are_not_taken() -> None:
    """Bounds follow norms, and sums and noise of such bounds would be rounded to nothing or be infinite."""
    assert floored({"a": 1e-28, "b": 1e-29}) is None
    assert floored({"a": 1e31, "b": 1.0}) is None
    assert floored({"a": 1e-26, "b": 0.0}) == {"a": 1e-26, "b": pytest.approx(1e-29)}
