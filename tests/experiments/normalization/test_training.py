"""One training run: its network, its budget, its result."""

import pytest
import torch
from torch import nn

import clipwise
from clipwise.errors import ClipwiseError
from clipwise.layers import BatchStatisticsNorm, PublicBatchNorm
from experiments.harness.limits import Deadline, OutOfTimeError
from experiments.harness.paper import Options, Place, Task
from experiments.normalization import sets
from experiments.normalization.networks import network
from experiments.normalization.setting import Setting
from experiments.normalization.training import train_task

CPU = torch.device("cpu")
TINY = Setting(data="digits", model="lenet_300_100", epochs=1, batch_size=256)


def run(setting, folder, seconds=None):
    task = Task(setting, 0, "test", Place("table-5", "a row", 1))
    return train_task(task, Options("normalization", folder), Deadline(seconds), folder)


@pytest.mark.parametrize("norm", ["none", "layer", "group", "public", "self+public", "public-exact"])
def test_a_private_run_spends_its_budget(norm, tmp_path):
    cell = run(TINY.but(norm=norm, epsilon=8.0, learning_rate=1.0), tmp_path)
    assert 7.9 < cell["epsilon"] <= 8 and cell["adjacency"] == "zero-out" and 0 <= cell["accuracy"] <= 1


def test_batch_norm_cannot_be_trained_privately(tmp_path):
    with pytest.raises(ClipwiseError, match="batch"):
        run(TINY.but(norm="batch", epsilon=8.0), tmp_path)


def test_batch_norm_where_microbatches_are_clipped(tmp_path, monkeypatch):
    """The noise of an update is that of per-example clipping; statistics for evaluation are those of public rows."""
    models, made, make_private = [], [], clipwise.make_private

    def noted(model, *given, **options):
        models.append(model)
        made.append(make_private(model, *given, **options))
        return made[-1]

    def noise(private, divisor):
        (part,) = private.parts()
        return private.optimizer.param_groups[0]["lr"] * part.noise_std / divisor

    monkeypatch.setattr(clipwise, "make_private", noted)
    setting = TINY.but(epsilon=8.0, learning_rate=1.0)
    run(setting, tmp_path)
    cell = run(setting.but(norm="batch", clip="batch"), tmp_path)
    assert 7.9 < cell["epsilon"] <= 8 and 0 <= cell["accuracy"] <= 1
    assert noise(made[0], 256) == pytest.approx(noise(made[1], 16), rel=1e-6)
    norms = [m for m in models[1].modules() if isinstance(m, BatchStatisticsNorm)]
    assert norms and all(int(norm.num_batches_tracked) == 8 for norm in norms), "128 public rows, 16 at a time"


@pytest.mark.parametrize("changes", [{"norm": "released"}, {"norm": "batch", "clip": "batch", "statistics": "noised"}])
def test_noised_statistics_are_part_of_the_release_and_need_no_public_rows(changes, tmp_path):
    setting = TINY.but(epsilon=8.0, learning_rate=1.0, **changes)
    assert not setting.needs_public_rows
    cell = run(setting, tmp_path)
    assert 7.9 < cell["epsilon"] <= 8 and cell["parts"] == 1 + 3, "the gradient, and each of three layers"


def test_training_without_privacy_learns_and_notes_every_epoch(tmp_path):
    cell = run(TINY.but(norm="batch", epochs=4, learning_rate=1e-2, noise=0.01), tmp_path)
    assert cell["accuracy"] > 0.8 and cell["epsilon"] is None
    assert len(cell["validation_accuracy_by_epoch"]) == 4


@pytest.mark.parametrize("epsilon", [None, 8.0])
def test_when_the_time_is_up_there_is_no_result(epsilon, tmp_path):
    with pytest.raises(OutOfTimeError):
        run(TINY.but(epsilon=epsilon), tmp_path, seconds=0.0)


def network_of(setting, public):
    rows = sets.public_rows("digits", setting.side, None, CPU) if setting.needs_public_rows else None
    return network(setting, 0, 1, 10, public, rows)


def test_pretrained_convolutions_stay_and_linear_layers_are_fresh(monkeypatch):
    monkeypatch.setattr("experiments.normalization.networks.PRETRAINING_EPOCHS", 1)
    public = sets.load("digits", 32, None, CPU, judged_by="test", trains_on_all=True).public
    setting = Setting(data="digits", model="light_vgg", width=4, norm="public-exact", epsilon=8.0)
    plain, pretrained = (network_of(setting.but(pretrained=flag), public) for flag in (False, True))
    layers = list(zip(plain, pretrained, strict=True))
    for one, two in layers:
        if isinstance(one, nn.Conv2d):
            assert not torch.equal(one.weight, two.weight) and not two.weight.requires_grad
        if isinstance(one, nn.Linear):
            assert torch.equal(one.weight, two.weight) and two.weight.requires_grad
    assert all(two.weight.requires_grad for _, two in layers if isinstance(two, PublicBatchNorm))
