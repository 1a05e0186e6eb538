"""Times of an epoch, the error of clipping, and trials on several validation parts."""

import pytest
import torch

import clipwise
from experiments.harness.limits import Deadline, OutOfTimeError
from experiments.lip_dp_sgd import jobs
from experiments.lip_dp_sgd.sets import records
from experiments.lip_dp_sgd.training import begun
from experiments.lip_dp_sgd.trial import Trial

CPU = torch.device("cpu")
TRIAL = Trial("digits", epsilon=8.0, sample_rate=0.25, epochs=1, max_norm=0.1)
NEVER = Deadline(None)


def test_small_data_is_judged_by_the_mean_over_parts(monkeypatch):
    seen = []

    def noted(trial, at_hand, seed, deadline, shared):
        seen.append((seed, at_hand.held_out.tensors[1].sum().item()))
        return {"accuracy": 0.1 * len(seen), "loss": 1.0, "seconds": 1.0, "epsilon": 7.0 + len(seen) / 10}

    monkeypatch.setattr(jobs, "run", noted)
    found = jobs.work(TRIAL, jobs.Bench(None, CPU, NEVER), 0, "validation")
    assert found["accuracy"] == pytest.approx(0.2) and found["seconds"] == 3 and found["epsilon"] == 7.3
    assert len(seen) == 3 and len({labels for _, labels in seen}) == 3
    assert jobs.work(TRIAL, jobs.Bench(None, CPU, NEVER), 0, "test")["accuracy"] == pytest.approx(0.4)


def test_the_error_of_clipping_is_that_of_autograd():
    at_hand = records("digits", None, CPU)
    training = begun(TRIAL, at_hand, 0)
    x, y = (t[:6] for t in at_hand.train.tensors)
    rows = []
    for one_x, one_y in zip(x, y, strict=True):
        loss = torch.nn.functional.cross_entropy(training.model(one_x[None]), one_y[None])
        grads = torch.autograd.grad(loss, list(training.model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    g = torch.stack(rows)
    C = 1.001 * float(g.norm(dim=1).median())  # some are clipped, and some are not
    found = jobs._norms(training.model, x, y, C)
    clipped = g * (C / g.norm(dim=1)).clamp(max=1)[:, None]
    assert 0 < found["share_clipped"] < 1
    assert found["error"] == pytest.approx(float((g.mean(0) - clipped.mean(0)).norm()), rel=1e-3, abs=1e-5)
    assert found["clipped"] == pytest.approx(float(clipped.mean(0).norm()), rel=1e-3)
    assert found["share_clipped"] == pytest.approx(float((g.norm(dim=1) > C).double().mean()), abs=1e-3)


def test_bias_follows_a_run():
    found = jobs.work(jobs.Bias(TRIAL), jobs.Bench(None, CPU, NEVER), 0, "validation")
    assert [place["step"] for place in found["curve"]] == [1, 2, 3, 4]
    assert all(place["clipped"] <= 0.1 + 1e-6 for place in found["curve"])


@pytest.mark.skipif(not hasattr(clipwise, "Lipschitz"), reason="weight clipping is not there")
def test_times_of_every_method():
    found = jobs.work(jobs.Times("digits", 64), jobs.Bench(None, CPU, NEVER), 0, "validation")
    assert set(found["seconds_of_an_epoch"]) == {"plain", "dp-sgd", "lip"}
    assert all(seconds > 0 for seconds in found["seconds_of_an_epoch"].values())


def test_out_of_time():
    with pytest.raises(OutOfTimeError):
        jobs.work(jobs.Bias(TRIAL), jobs.Bench(None, CPU, Deadline(0.0)), 0, "validation")


def test_jobs_have_different_keys():
    keys = {TRIAL.key, jobs.Bias(TRIAL).key, jobs.Times("digits", 64).key, jobs.Times("digits", 32).key}
    assert len(keys) == 4
