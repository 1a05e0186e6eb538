"""Averages of parameters: what they are, and that nothing else changes."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clipwise.errors import CheckpointError, ConfigurationError, StepError
from clipwise.layers.replace_batchnorm import replace_batchnorm
from clipwise.optim.averaging import AveragedParameters
from tests.runs import losses_of, network, parameters, private_run, same, train


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()


def wander(net: nn.Module, averages: AveragedParameters, steps: int) -> list[torch.Tensor]:
    seen = []
    for _ in range(steps):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        averages.update()
        seen.append(net[0].weight.detach().clone())  # type: ignore[index]
    return seen


@given(steps=st.integers(1, 8), start=st.integers(0, 4))
def test_the_uniform_average_is_the_mean_since_its_start(steps: int, start: int) -> None:
    net = model()
    averages = AveragedParameters(net, kind="uniform", start=start)
    seen = wander(net, averages, steps)
    expected = torch.stack(seen[min(start, steps - 1) :]).mean(0)
    with averages.applied():
        assert torch.allclose(net[0].weight, expected, rtol=1e-12, atol=1e-12)  # type: ignore[index]


@given(steps=st.integers(1, 30), decay=st.sampled_from([0.0, 0.5, 0.9]))
def test_the_exponential_average_follows_its_formula(steps: int, decay: float) -> None:
    net = model()
    averages = AveragedParameters(net, decay)
    seen = wander(net, averages, steps)
    expected = seen[0]
    for t, p in enumerate(seen[1:], start=1):
        d = min(decay, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * p
    with averages.applied():
        assert torch.allclose(net[0].weight, expected, rtol=1e-12, atol=1e-12)  # type: ignore[index]


def test_the_model_gets_its_own_parameters_back_even_after_an_error() -> None:
    net = model()
    averages = AveragedParameters(net)
    wander(net, averages, 3)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(RuntimeError), averages.applied():
        assert not torch.equal(net[0].weight, before["0.weight"])  # type: ignore[index]
        raise RuntimeError
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("kind", ["public", "public-exact", "self+public"])
def test_public_statistics_go_with_the_weights_that_are_there(kind: str) -> None:
    """In the block they are those of the averages, afterwards those of the last weights: as of a model of its own."""
    public, rows = torch.randn(5, 3).double(), torch.randn(4, 3).double()
    net, statistics = replace_batchnorm(model(), public, kind)
    averages = AveragedParameters(net, 0.5)
    wander(net, averages, 3)
    statistics.refresh()
    last, other = net(rows), replace_batchnorm(model(), public, kind)[0]
    averages.copy_to(other)
    with averages.applied():
        assert torch.equal(net(rows), other(rows))
        assert not torch.equal(net(rows), last)
    assert torch.equal(net(rows), last)


def test_it_continues_from_a_checkpoint_bit_for_bit() -> None:
    net = model()
    averages = AveragedParameters(net, 0.9)
    wander(net, averages, 4)
    file = io.BytesIO()
    torch.save(averages.state_dict(), file)
    other = AveragedParameters(net, 0.9)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    wander(net, averages, 0)
    for one in (averages, other):
        one.update()
    assert other.updates == 5
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            averages.state_dict()["averages"].values(), other.state_dict()["averages"].values(), strict=True
        )
    )


def test_a_saved_state_does_not_change_with_later_updates() -> None:
    net = model()
    averages = AveragedParameters(net)
    state = averages.state_dict()
    before = state["averages"]["0.weight"].clone()
    wander(net, averages, 2)
    assert torch.equal(state["averages"]["0.weight"], before)


def test_a_parameter_that_is_frozen_later_keeps_its_average() -> None:
    net = model()
    averages = AveragedParameters(net, 0.0)
    net[0].weight.requires_grad_(False)  # type: ignore[index]
    averages.update()
    with averages.applied():
        assert averages.is_applied


def test_frozen_parameters_and_buffers_are_left_out_and_a_copy_takes_the_rest() -> None:
    net = model()
    net[0].bias.requires_grad_(False)  # type: ignore[index]
    averages = AveragedParameters(net)
    wander(net, averages, 2)
    assert set(averages.state_dict()["averages"]) == {"0.weight", "1.weight", "1.bias"}
    target = model()
    averages.copy_to(target)
    assert torch.equal(target[0].weight, averages.state_dict()["averages"]["0.weight"])  # type: ignore[index]


def test_a_copy_goes_to_a_model_of_the_same_kind() -> None:
    averages = AveragedParameters(network())
    for other in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))):
        before = parameters(other)
        with pytest.raises(ConfigurationError, match=r"copy_to: the model has no parameter '0\.weight' of shape"):
            averages.copy_to(other)
        assert same(before, parameters(other))


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"kind": "other"}, {"start": -1}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        AveragedParameters(model(), **options)  # type: ignore[arg-type]


def test_another_model_and_other_settings_are_refused() -> None:
    averages = AveragedParameters(model())
    with pytest.raises(CheckpointError, match="decay"):
        averages.load_state_dict(AveragedParameters(model(), 0.5).state_dict())
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        averages.load_state_dict(AveragedParameters(nn.Sequential(nn.Linear(4, 2))).state_dict())
    with pytest.raises(CheckpointError, match="more"):
        AveragedParameters(nn.Sequential(nn.Linear(3, 2))).load_state_dict(averages.state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        averages.load_state_dict({"kind": "exponential"})


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_private_run_takes_in_every_update_once(by_hand: bool) -> None:
    net = network()
    net, private = private_run(net, ema=AveragedParameters(net, kind="uniform"))
    seen = []
    for batch in private.loader:
        if by_hand:
            private.backward(losses_of(net, batch))
            private.optimizer.step()
        else:
            private.step(losses_of(net, batch))
        seen.append(parameters(net))
    assert private.ema.updates == len(seen) == 5
    with private.ema.applied():
        for name, p in net.named_parameters():
            assert torch.allclose(p, torch.stack([s[name] for s in seen]).mean(0), rtol=1e-5, atol=1e-6)
    assert same(parameters(net), seen[-1])


def test_nothing_is_trained_while_the_model_has_its_averages() -> None:
    """The block would give the weights back, and the update would be lost after it was charged."""
    net, private = private_run(ema=0.5)
    train(net, private, 2)
    batch = next(iter(private.loader))
    before = parameters(net)
    with private.ema.applied():
        for forbidden in (
            lambda: private.step(losses_of(net, batch)),
            lambda: next(iter(private.loader)),
            private.state_dict,  # the model's own would hold the averages
        ):
            with pytest.raises(StepError, match=r"inside a block of private\.ema\.applied\(\)"):
                forbidden()
        with private.ema.applied() as again:  # in a function that is called there, say
            assert again is net and not same(parameters(net), before)
        assert not same(parameters(net), before)
    assert private.steps == 2 and same(parameters(net), before)
    train(net, private, 1)


def test_averages_are_part_of_a_checkpoint() -> None:
    net, private = private_run(ema=0.5)
    train(net, private, 3)
    state = private.state_dict()
    other, second = private_run(ema=0.5)
    other.load_state_dict(net.state_dict())
    with pytest.warns(match="fresh secret"):
        second.load_state_dict(state)
    assert same(state["ema"]["averages"], second.ema.state_dict()["averages"])
    assert second.ema.updates == 3
    other, third = private_run(ema=0.9)
    other.load_state_dict(net.state_dict())
    with pytest.raises(CheckpointError, match="decay"):
        third.load_state_dict(state)


def test_a_run_without_averages_explains_how_to_get_them() -> None:
    with pytest.raises(ConfigurationError, match=r"ema=0\.999"):
        _ = private_run()[1].ema
    for bad in ("0.9", True, False, 1.0, -0.1, float("nan")):
        with pytest.raises(ConfigurationError, match="ema must be"):
            private_run(ema=bad)
