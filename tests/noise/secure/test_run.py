"""Whole runs with secure noise: releases are on the grid, and statements and ledgers name the noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytest.importorskip("cryptography")

from clipwise import Batch, NoisedStatistics, PerExample, Private, Quantile, layers, make_private
from clipwise.engine import checkpoint
from clipwise.engine.compiled import CompiledStep
from clipwise.errors import ConfigurationError, PrivacyWarning
from clipwise.ledger import ledger
from clipwise.privacy import effective_multiplier
from clipwise.report import statement
from tests.runs import (
    LAYERS,
    clipped_sum_by_hand,
    data,
    gradients,
    losses_of,
    network,
    parameters,
    private_run,
    same,
    train,
)

DOUBLE = torch.float64
ALL = tuple(name for names in LAYERS.values() for name in names)


def secure_run(dtype: torch.dtype = DOUBLE, **options: Any) -> tuple[nn.Module, Private]:
    return private_run(network(dtype), None, data(dtype=dtype), noise="secure", **options)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "full"])
@pytest.mark.parametrize("parts", ["all", "layer"])
def test_every_released_value_is_a_multiple_of_its_part_s_grid(parts: str, sampling: str, dtype: torch.dtype) -> None:
    options = {} if sampling == "full" else {"batch_size": 8}
    model, private = private_run(
        network(dtype),
        None,
        data(32, dtype=dtype),
        noise="secure",
        clipping=PerExample(0.7, parts=parts),
        sampling=sampling,
        **options,
    )
    assert math.frexp(private.divisor)[0] == 0.5  # so that the division keeps multiples
    train(model, private, 3)
    found = gradients(model)
    for part in private.parts():
        assert part.grid > 0 and math.frexp(part.grid)[0] == 0.5
        for name in part.parameters:
            steps = found[name].double() * private.divisor / part.grid
            assert torch.equal(steps, steps.round())
            assert int(steps.abs().max()) > 1000  # the grid is fine


def test_a_step_is_the_clipped_sum_and_noise_of_the_stated_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 3)).to(DOUBLE)
    dataset = data(dtype=DOUBLE)
    _, private = private_run(model, None, dataset, noise="secure", noise_multiplier=1.3, seed=3)
    (part,) = private.parts()
    size = sum(p.numel() for p in model.parameters())
    assert part.sensitivity == pytest.approx(1 + part.grid * math.sqrt(size), rel=1e-9)
    assert part.noise_std == pytest.approx(1.3 * part.sensitivity, rel=1e-9)
    assert effective_multiplier([part]) >= private.noise_multiplier
    batch = next(iter(private.loader))
    total = clipped_sum_by_hand(model, dataset, private.loader.current.indices.tolist(), {ALL: 1.0})
    private.backward(losses_of(model, batch))
    noise = torch.cat([(g * 8 - total[name]).flatten() for name, g in gradients(model).items()])
    assert float(noise.std()) == pytest.approx(part.noise_std, rel=0.05)
    assert abs(float(noise.mean())) < 4 * part.noise_std / math.sqrt(size)


def test_the_noise_follows_a_bound_that_adapts() -> None:
    model, private = secure_run(clipping=PerExample(Quantile(target=0.5, initial=0.3, count_noise=0.5)))
    before = private.parts()
    train(model, private, 5)
    after = private.parts()
    assert before[0].sensitivity != after[0].sensitivity
    assert all(p.grid > 0 for p in (*before, *after))
    assert effective_multiplier(after) >= private.noise_multiplier


def test_statistics_of_a_layer_are_rounded_in_all_their_coordinates() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)).double()
    layers.without_running_statistics(model)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(torch.randn(64, 4, dtype=DOUBLE), torch.randn(64, dtype=DOUBLE)),
        batch_size=16,
        noise_multiplier=1.0,
        clipping=Batch(1.0, running_statistics=NoisedStatistics(max_norm=0.5)),
        noise="secure",
    )
    (part,) = (p for p in private.parts() if not p.parameters)
    assert part.grid * math.sqrt(2 * 64) <= 2.0**-16  # 2 R = 1
    assert part.sensitivity >= 1 + part.grid * math.sqrt(2 * 64)


def test_without_noise_nothing_is_rounded() -> None:
    model, private = secure_run(noise_multiplier=0)
    assert all(p.grid == 0 for p in private.parts())
    train(model, private, 1)


def test_a_budget_costs_what_it_costs_with_standard_noise() -> None:
    _, secure = secure_run(epsilon=2.0, delta=1e-5, epochs=2)
    _, standard = private_run(epsilon=2.0, delta=1e-5, epochs=2)
    assert secure.noise_multiplier == standard.noise_multiplier


def test_a_seed_gives_the_same_run_again_and_each_kind_noise_of_its_own() -> None:
    runs = []
    for noise in ("secure", "secure", "standard"):
        model, private = private_run(noise=noise, seed=7)
        train(model, private, 3)
        runs.append(parameters(model))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


def test_a_compiled_step_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.engine.compiled._can_capture", lambda device: True)
    for noise in ("standard", "secure"):
        _, private = private_run(noise=noise)
        assert CompiledStep(private._context, lambda x, y: x.sum(1))._stays_eager == (noise == "secure")


@pytest.mark.parametrize("noise", ["Secure", "", None, 1, ["secure"]])
def test_a_kind_that_is_not_known_is_refused(noise: Any) -> None:
    with pytest.raises(ConfigurationError, match="'standard', 'secure'"):
        private_run(noise=noise)


# ---- statement, ledger, checkpoint ----------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["standard", "secure"])
def test_statement_ledger_and_checkpoint_record_the_kind(noise: str, tmp_path: Path) -> None:
    model, private = private_run(noise=noise, ledger=tmp_path / "run.ledger")
    train(model, private, 2)
    said = private.statement()
    assert private.state_dict()["configuration"]["noise"] == noise
    private.close()
    (about,) = ledger.read(tmp_path / "run.ledger").about
    assert about["noise"] == noise
    read = statement.of_ledger(tmp_path / "run.ledger")
    for found in (said, read):
        assert found.noise == found.to_dict()["noise"] == noise
        text = str(found)
        is_secure = noise == "secure"
        assert ("ChaCha20" in text) == is_secure and ("Philox" in text) == (not is_secure)
        assert ("low bits" in text) == (not is_secure)
        assert ("step 2^-" in text) == is_secure
    assert [p.grid for p in read.about.parts or ()] == [p.grid for p in private.parts()]


@pytest.mark.parametrize("first", ["standard", "secure"])
def test_another_kind_continues_with_a_fresh_key_and_the_weaker_one_is_stated(first: str, tmp_path: Path) -> None:
    second = {"standard": "secure", "secure": "standard"}[first]
    file = tmp_path / "run.ledger"
    model, private = private_run(noise=first, ledger=file)
    train(model, private, 2)
    state, secret = private.state_dict(), private._context.keys.key.secret_bytes()
    private.close()
    again, goes_on = private_run(noise=second, ledger=file)
    again.load_state_dict(model.state_dict())
    with pytest.warns(PrivacyWarning, match="fresh secret"):
        goes_on.load_state_dict(state)
    assert goes_on._context.keys.key.secret_bytes() != secret
    train(again, goes_on, 1)
    assert goes_on.statement().noise == "standard"
    assert "low bits" in str(goes_on.statement())


def test_a_clean_stop_changes_nothing(tmp_path: Path) -> None:
    whole, private = private_run(noise="secure", seed=1)
    train(whole, private, 6)
    model, private = private_run(noise="secure", seed=1, ledger=tmp_path / "run.ledger")
    train(model, private, 3)
    state = private.state_dict()
    private.close()
    private.optimizer.zero_grad()
    _, private = private_run(model, noise="secure", ledger=tmp_path / "run.ledger")
    private.load_state_dict(state)
    train(model, private, 3)
    assert same(parameters(model), parameters(whole))
    checkpoint.history_of(private.state_dict())


# ---- one key, one draw ----------------------------------------------------------------------------------


def drawn_keys(private: Private, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that noise is drawn from, from now on."""
    seen: list[bytes] = []

    def watched(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda key, *rest, **options: seen.append(key) or draw(key, *rest, **options)

    from clipwise.noise import mechanism

    for name in ("add_gaussian", "gaussian", "rounded_gaussian"):
        monkeypatch.setattr(mechanism, name, watched(getattr(mechanism, name)))
    return seen


@pytest.mark.parametrize("noise", ["standard", "secure"])
def test_no_key_serves_two_draws(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over parts, buckets and steps, and after loading an earlier checkpoint."""
    for module in ("gaussian", "mechanism"):
        monkeypatch.setattr(f"clipwise.noise.{module}.BUCKET", 10)
    model, private = private_run(noise=noise, clipping=PerExample(1.0, parts="layer"))
    seen = drawn_keys(private, monkeypatch)
    train(model, private, 4)
    state = private.state_dict()
    assert len(seen) == 4 * 4  # four tensors, each too large to share a bucket
    with pytest.warns(PrivacyWarning):
        private.load_state_dict(state)
    train(model, private, 4)
    assert len(set(seen)) == len(seen) == 8 * 4
