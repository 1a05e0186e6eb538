"""One training run: its data, its noise, its result."""

import math

import pytest
import torch

from clipwise import data, models
from clipwise.bench.limits import Deadline
from clipwise.reproduce import training
from clipwise.reproduce.batch_clipping.figures import LENET
from clipwise.reproduce.pictures import pictures

CPU = torch.device("cpu")
SMALL = LENET.but(data="digits", epochs=1)


def test_parts_share_no_image(digits):
    found = [{x.numpy().tobytes() for x in part.tensors[0]} for part in (digits.private, digits.public)]
    assert not found[0] & found[1] and len(digits.public) == 144 and len(digits.held_out) == 360
    assert digits.centred(digits.public.tensors[0][:2]).shape == (2, 1, 32, 32)


def test_while_settings_are_chosen_the_test_part_is_not_read(monkeypatch):
    asked = []
    original = data.images
    monkeypatch.setattr(
        data, "images", lambda name, train, folder: asked.append(train) or original(name, train)
    )
    found = pictures("digits", None, CPU, judged_by="validation")
    assert asked == [True] and len(found.held_out) == 144 and len(found.private) == 1437 - 288


@pytest.mark.parametrize("clip", ["batch", "example"])
def test_the_noise_is_the_papers(digits, clip):
    """2 C_h sigma on part h, with C_h = C for the part with the largest norm."""
    setting = SMALL.but(clip=clip, norm="group", sigma=2.5)
    torch.manual_seed(0)
    model = models.build("bn_lenet5", norm="group")
    private = training._Privately(setting, model, digits)._private
    parts = private.parts()
    assert len(parts) == 8 and private.noise_multiplier == pytest.approx(2.5 / math.sqrt(8))
    for part in parts:
        assert part.noise_std == pytest.approx(2.5 * part.sensitivity, rel=1e-6)
    assert max(part.sensitivity for part in parts) == pytest.approx(2 * 0.2, rel=1e-6)


@pytest.mark.parametrize("parts", ["all", "layerwise", "multipliers"])
def test_a_noise_rate_is_the_noise_of_an_update(digits, parts):
    """Measured: without signal, the weights move by the noise alone."""
    setting = SMALL.but(
        clip="example",
        norm="group",
        parts=parts,
        sigma=None,
        epsilon=3.0,
        noise_rate=1e-3,
        sampling="poisson",
    )
    torch.manual_seed(0)
    model = models.build("bn_lenet5", norm="group")
    trainer = training._Privately(setting.but(max_norm=1e-9), model, digits)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    for x, _y in trainer._private.loader:
        trainer._private.step((model(x) * 0).sum(1))
        break
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert float(moved.double().square().mean().sqrt()) == pytest.approx(1e-3, rel=0.02)


def test_a_run_with_batch_norm(digits):
    result = training.train(SMALL.but(sigma=0.01), digits, 0, Deadline(None))
    assert result["epsilon"] > 100 and result["steps"] == 21 and result["parts"] == 8
    assert result["parameters"] == 61_990 and len(result["public_accuracy_by_epoch"]) == 1
    assert result["accuracy"] * 360 == pytest.approx(round(result["accuracy"] * 360))


def test_a_run_without_privacy_learns_and_watches_norms(digits):
    setting = SMALL.but(
        clip="none", parts="all", sigma=None, watches_norms=True, augmented=False, learning_rate=0.2, epochs=2
    )
    result = training.train(setting, digits, 0, Deadline(None))
    assert result["accuracy"] > 0.5 and result["epsilon"] is None
    assert len(result["norms_by_epoch"]) == 2 and len(result["norms_by_epoch"][0]) == 16
    # A bias in front of batch norm has no gradient.
    weights = [norm for name, norm in result["norms_by_epoch"][1].items() if name.endswith("weight")]
    assert len(weights) == 8 and min(weights) > 0


def test_time_that_runs_out_within_a_run_leaves_no_result(digits):
    with pytest.raises(training.OutOfTimeError):
        training.train(SMALL, digits, 0, Deadline(0.0))
