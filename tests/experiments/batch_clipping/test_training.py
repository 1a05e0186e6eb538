"""One training run: its data, its noise, its result."""

import math

import pytest
import torch

from experiments import data, models
from experiments.batch_clipping import training
from experiments.batch_clipping.figures import LENET
from experiments.batch_clipping.pictures import pictures
from experiments.harness.limits import Deadline, OutOfTimeError

CPU = torch.device("cpu")
SMALL = LENET.but(data="digits", epochs=1)


def test_parts_share_no_image(digits):
    found = [{x.numpy().tobytes() for x in part.tensors[0]} for part in (digits.private, digits.public)]
    assert not found[0] & found[1] and len(digits.public) == 144 and len(digits.held_out) == 360
    assert digits.centred(digits.public.tensors[0][:2]).shape == (2, 1, 32, 32)


def test_while_settings_are_chosen_the_test_part_is_not_read(monkeypatch):
    asked = []
    original = data.images
    monkeypatch.setattr(data, "images", lambda name, train, folder: asked.append(train) or original(name, train))
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
        clip="example", norm="group", parts=parts, sigma=None, epsilon=3.0, noise_rate=1e-3, sampling="poisson"
    )
    torch.manual_seed(0)
    model = models.build("bn_lenet5", norm="group")
    trainer = training._Privately(setting.but(max_norm=1e-9), model, digits)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    for x, _y in trainer._private.loader.pieces():
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
    with pytest.raises(OutOfTimeError):
        training.train(SMALL, digits, 0, Deadline(0.0))


class EndsAfter(Deadline):
    """A time limit that is enough for so many readings of the clock."""

    def __init__(self, looks):
        super().__init__(None)
        self._looks = looks

    def left(self):
        self._looks -= 1
        return float("inf") if self._looks >= 0 else 0.0


STEPS = 21  # of an epoch


@pytest.mark.parametrize("clip", ["batch", "none"])
@pytest.mark.parametrize(
    ("looks", "keep_after"),
    [(2 * STEPS + 1, math.inf), (2 * STEPS + 5, -1.0)],
    ids=["between epochs", "within an epoch"],
)
def test_a_stopped_run_continues(digits, tmp_path, monkeypatch, clip, looks, keep_after):
    """It is as long and costs as much as one that was never stopped, and keeps its falling rate."""
    monkeypatch.setattr(training, "_KEEP_AFTER", keep_after)
    openly = {"sigma": None, "parts": "all"} if clip == "none" else {}
    setting, kept = SMALL.but(epochs=3, clip=clip, **openly), tmp_path / "kept.pt"
    with pytest.raises(OutOfTimeError) as stopped:
        training.train(setting, digits, 0, EndsAfter(looks), kept)
    begun = stopped.value.progress["public_accuracy_by_epoch"]
    assert len(begun) == 2 and kept.exists()
    result = training.train(setting, digits, 0, Deadline(None), kept)
    assert result["public_accuracy_by_epoch"][:2] == begun and len(result["public_accuracy_by_epoch"]) == 3
    assert not kept.exists()
    if clip == "batch":
        whole = training.train(setting, digits, 0, Deadline(None))
        assert (result["steps"], result["epsilon"]) == (whole["steps"], whole["epsilon"]) == (63, whole["epsilon"])
        assert result["learning_rate_at_last"] == pytest.approx(0.025 * 0.9**3)


def test_a_damaged_file_counts_as_none(digits, tmp_path):
    kept = tmp_path / "kept.pt"
    kept.write_bytes(b"no checkpoint")
    assert training.train(SMALL, digits, 0, Deadline(None), kept)["steps"] == STEPS


def test_entries_with_small_gradients_are_frozen_late(digits):
    setting = SMALL.but(sparse_from=1, epochs=2, sigma=2.5, norm="group")
    model = models.build("bn_lenet5", norm="group")
    trainer = training._Privately(setting, model, digits)
    found = []
    for _ in range(setting.epochs):
        trainer.epoch(Deadline(None))
        found.append(sum(int(f.sum()) for f in trainer._private._context.clipper.frozen.values()))
    assert found[0] == 0 and found[1] > 1000


def test_views_of_an_example_are_averaged(digits):
    """As a captured step needs them: one row per example."""
    setting = SMALL.but(clip="example", norm="group", views=3)
    model = models.build("bn_lenet5", norm="group")
    trainer = training._Privately(setting, model, digits)
    x, y = (t[:4] for t in digits.private.tensors)
    ready, labels = trainer._ready(x, y)
    assert ready.shape == (4, 3, 1, 32, 32) and labels.shape == (4,)
    each = torch.stack([trainer._losses(ready[:, [k]].repeat(1, 3, 1, 1, 1), labels) for k in range(3)])
    torch.testing.assert_close(trainer._losses(ready, labels), each.mean(0))


def test_views_may_be_cropped_and_not_flipped(digits):
    """A row that no flip leaves as it is: bright on the left."""
    x = torch.zeros(64, 1, 32, 32)
    x[..., 8] = 1.0
    left = digits.views(1, augmented=True, flipped=False).of(x)
    assert set(left.argmax(-1).amax((1, 2)).tolist()) <= set(range(4, 13))
    both = digits.views(1, augmented=True).of(x)
    assert both.argmax(-1).amax() > 16
