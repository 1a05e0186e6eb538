"""One trial: it keeps its budget, all methods begin with the same network, and noise is calibrated once."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import clipwise
from clipwise import accounting
from clipwise.errors import ConfigurationError
from experiments.harness.calibration import multiplier
from experiments.harness.limits import Deadline, OutOfTimeError
from experiments.lip_dp_sgd.sets import Records, records
from experiments.lip_dp_sgd.training import begun, judged, network, run
from experiments.lip_dp_sgd.trial import METHODS, Trial

CPU = torch.device("cpu")
SHORT = Trial("digits", epsilon=8.0, sample_rate=0.1, epochs=1)


@pytest.fixture(scope="module")
def digits():
    return records("digits", None, CPU)


def methods():
    has_lipschitz = hasattr(clipwise, "Lipschitz")
    return [m for m in METHODS if has_lipschitz or "lip" not in m]


@pytest.mark.parametrize("method", [m for m in methods() if m != "plain"])
@pytest.mark.parametrize("norm", ["none", "bounded"])
def test_a_run_keeps_its_budget(digits, method, norm):
    found = run(SHORT.but(method=method, norm=norm), digits, 0)
    assert 7.9 < found["epsilon"] <= 8.0 and found["steps"] == 10
    expected = accounting.epsilon(
        noise_multiplier=found["noise_multiplier"], sample_rate=0.1, steps=10, delta=digits.delta
    )
    assert found["epsilon"] == pytest.approx(expected, rel=1e-6)
    assert 0 <= found["accuracy"] <= 1


def test_a_given_noise_is_the_noise(digits):
    found = run(SHORT.but(epsilon=None, noise_multiplier=3.0), digits, 0)
    assert found["noise_multiplier"] == 3.0


def test_without_privacy_it_learns(digits):
    trial = Trial("digits", "plain", batch_size=64, epochs=8, learning_rate=1e-2)
    found = run(trial, digits, 0)
    assert found["epsilon"] is None and found["accuracy"] > 0.8


def test_averages_are_judged_too(digits):
    found = run(SHORT.but(averaged=0.9), digits, 0)
    assert 0 <= found["averaged_accuracy"] <= 1


def test_every_method_begins_with_the_same_weights(digits):
    first, *others = (network(SHORT.but(method=m), digits, 5).state_dict() for m in METHODS[:3])
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    elsewhere = network(SHORT, digits, 6).state_dict()
    assert any(not torch.equal(first[name], elsewhere[name]) for name in first)


def test_building_a_network_leaves_the_random_state_alone(digits):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    network(SHORT, digits, 1)
    assert torch.equal(torch.rand(3), expected)


def test_orthogonal_first_weights_have_singular_values_of_one(digits):
    """And are the same for every method; those of torch are not orthogonal."""
    trial = Trial("digits", epsilon=1.0, sample_rate=0.1, first_weights="orthogonal")
    model, other = network(trial, digits, 3), network(trial.but(method="lip"), digits, 3)
    usual = network(trial.but(first_weights="usual"), digits, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    for p, q in zip(model.parameters(), usual.parameters(), strict=True):
        if p.ndim == 1:
            assert not p.any()
        else:
            ones = torch.ones(min(p.shape))
            assert torch.allclose(torch.linalg.svdvals(p.detach()), ones, atol=1e-5)
            assert not torch.allclose(torch.linalg.svdvals(q.detach()), ones, atol=0.1)
    with pytest.raises(ConfigurationError, match=r"first_weights='zero' is not known.*'orthogonal'"):
        trial.but(first_weights="zero")


def test_validation_records_are_not_trained_on(digits):
    whole = records("digits", None, CPU, judged_by="test")
    assert len(digits.train) + len(digits.held_out) == len(whole.train)
    rows = {tuple(row.tolist()) for row in digits.train.tensors[0]}
    twins = sum(tuple(row.tolist()) in rows for row in digits.held_out.tensors[0])
    assert twins == 0


def test_a_run_without_time_is_no_result(digits):
    with pytest.raises(OutOfTimeError):
        run(SHORT, digits, 0, Deadline(0.0))


def test_a_model_that_is_always_right_scores_one(digits):
    x, y = digits.held_out.tensors
    training = begun(SHORT, digits, 0).all_steps()
    accuracy, _ = judged(training.model, torch.utils.data.TensorDataset(x, training.model(x).argmax(1)))
    assert accuracy == 1
    wrong = (training.model(x).argmax(1) + 1) % 10
    assert judged(training.model, torch.utils.data.TensorDataset(x, wrong))[0] == 0
    del y


def test_noise_is_calibrated_once_for_all_processes(tmp_path, monkeypatch):
    first = multiplier(2.0, 1e-5, 0.1, 20, tmp_path)
    assert accounting.epsilon(noise_multiplier=first, sample_rate=0.1, steps=20, delta=1e-5) <= 2.0
    (file,) = tmp_path.glob("noise-*.json")
    assert json.loads(file.read_text())["noise_multiplier"] == first
    multiplier.__globals__["_found"].cache_clear()
    monkeypatch.setattr(accounting, "noise_multiplier", lambda **asked: pytest.fail("calibrated again"))
    assert multiplier(2.0, 1e-5, 0.1, 20, tmp_path) == first
    multiplier.__globals__["_found"].cache_clear()


def test_trials_have_different_keys():
    keys = {SHORT.key, SHORT.but(max_norm=2.0).key, SHORT.but(method="lip").key, SHORT.but(epochs=2).key}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sgd"}, "method='sgd' is not known"),
        ({"noise_multiplier": 1.0}, "epsilon or noise_multiplier"),
        ({"batch_size": 10}, "batch_size or sample_rate"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        SHORT.but(**options)
    with pytest.raises(ConfigurationError, match="data='iris' is not known"):
        records("iris", None, CPU)


def test_cost_closes_the_run(digits):
    training = begun(SHORT, digits, 0)
    training.step()
    assert training.cost()["epsilon"] < 8.0


def test_a_trial_may_name_its_network():
    images = torch.zeros(4, 1, 28, 28)
    rows = TensorDataset(images, torch.zeros(4, dtype=torch.long))
    at_hand = Records(rows, rows, "patch_convnet6", 10, 12.0, 1e-5)
    own, named = (network(SHORT.but(network=name), at_hand, 0) for name in (None, "convnet6"))
    strides = [[m.stride for m in model.modules() if isinstance(m, nn.Conv2d)] for model in (own, named)]
    assert strides[0] != strides[1]
    with pytest.raises(ConfigurationError, match="no such network"):
        network(SHORT.but(network="no such network"), at_hand, 0)


@pytest.mark.parametrize("method", [m for m in methods() if m != "plain"])
def test_pieces_of_a_batch_are_one_step(digits, method, monkeypatch):
    """A batch that comes in pieces, for memory: as many steps and as much privacy as in one."""
    monkeypatch.setattr("experiments.lip_dp_sgd.training._ROWS_TRAINED", 32)
    training = begun(SHORT.but(method=method, averaged=0.9), digits, 0).all_steps()
    assert training.private.steps == training.steps == 10
    assert training.average.updates == 10
    assert training.cost()["epsilon"] == pytest.approx(run(SHORT.but(method=method), digits, 0)["epsilon"])
