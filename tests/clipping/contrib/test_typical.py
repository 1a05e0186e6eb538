"""Norms on public data: those of the definition, and the model stays as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.clipping.contrib.typical import mean_norms
from clipwise.clipping.public import PublicData
from clipwise.clipping.thresholds import group_parameters
from clipwise.errors import ConfigurationError
from clipwise.layers import without_running_statistics
from tests.clipping.policies import loss, public, rows, small_model
from tests.gradients.cases import losses, oracle, trainable


def measured(on: nn.Module, data: PublicData, of: str = "example", size: int | None = None) -> dict[str, float]:
    return mean_norms(data, on, trainable(on), group_parameters("layer", trainable(on)), of, size)


def test_of_examples_by_definition() -> None:
    on = small_model()
    truth = oracle(small_model(), (rows(12),))
    for h, names in group_parameters("layer", trainable(on)).items():
        expected = torch.cat([truth[n].flatten(1) for n in names], 1).norm(dim=1).mean()
        assert measured(on, public())[h] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("count", "size", "sets"), [(12, 4, 3), (13, 4, 3), (3, 4, 1), (12, None, 3)])
def test_of_microbatches_by_definition(count: int, size: int | None, sets: int) -> None:
    """What is left over at the end is left out, unless there is nothing else."""
    on, used = small_model(), size or 4
    truth = oracle(small_model(), (rows(count),))
    found = measured(on, public(count, batch_size=4), "microbatch", size)
    for h, names in group_parameters("layer", trainable(on)).items():
        g = torch.cat([truth[n].flatten(1) for n in names], 1)
        means = [g[k * used : (k + 1) * used].mean(0).norm() for k in range(sets)]
        assert found[h] == pytest.approx(float(torch.stack(means).mean()), rel=1e-9)


@pytest.mark.parametrize("count", [12, 14])
def test_of_microbatches_a_single_number_will_do(count: int) -> None:
    """What is left over at the end is left out all the same."""
    on = small_model()
    whole = PublicData(TensorDataset(rows(count)), lambda model, x: loss(model, x).mean(), batch_size=4)
    found = measured(on, whole, "microbatch")
    assert found == pytest.approx(measured(on, public(count, batch_size=4), "microbatch"), rel=1e-12)
    with pytest.raises(ConfigurationError, match=r"one loss per example.*of='microbatch'"):
        measured(on, whole)


@pytest.mark.parametrize("of", ["example", "microbatch"])
def test_what_public_data_does_not_reach_has_norm_0(of: str) -> None:
    """For example the head of another task. Policies raise its norm to a minimum."""
    on = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    data = PublicData(TensorDataset(torch.randn(8, 3)), lambda model, x: model["used"](x).sum(1), batch_size=4)
    found = measured(on, data, of)
    assert found["idle"] == 0.0 < found["used"]


def test_a_batch_that_reaches_nothing_has_norm_0() -> None:
    on = nn.Linear(3, 2)
    data = PublicData(TensorDataset(torch.ones(4, 3)), lambda model, x: (x * torch.ones(3, requires_grad=True)).sum(1))
    assert measured(on, data, "microbatch") == {"model": 0.0}


def test_norms_of_microbatches_are_those_of_float64() -> None:
    """Squares of 1e25 are beyond float32."""
    on = nn.Linear(2, 1, bias=False)
    data = PublicData(TensorDataset(torch.full((4, 2), 1e25)), lambda model, x: model(x).sum(1), batch_size=2)
    assert measured(on, data, "microbatch")["model"] == pytest.approx(2**0.5 * 1e25)


def test_norms_of_microbatches_with_sparse_gradients() -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        on = nn.Embedding(5, 3, sparse=sparse)
        ids = TensorDataset(torch.tensor([[1, 1], [2, 4], [1, 0], [3, 3]]))
        data = PublicData(ids, lambda model, x: model(x).square().sum((1, 2)), batch_size=2)
        found.append(measured(on, data, "microbatch")["model"])
    assert found[0] > 0 and found[1] == pytest.approx(found[0])


def test_a_microbatch_with_a_gradient_that_is_not_finite_is_left_out() -> None:
    """Its loss may be finite all the same."""
    on = nn.Linear(1, 1, bias=False)
    nn.init.ones_(on.weight)
    x = torch.tensor([[0.0], [0.0], [4.0], [4.0]])
    data = PublicData(TensorDataset(x), lambda model, x: (model.weight * x).sqrt().sum(1), batch_size=2)
    assert measured(on, data, "microbatch")["model"] == pytest.approx(1.0)


def test_a_loss_that_fails_on_public_data_is_named() -> None:
    narrow = PublicData(TensorDataset(torch.randn(8, 2)), loss, batch_size=4, name="narrow")
    with pytest.raises(ConfigurationError, match=r"PublicData\(narrow\): loss.*does not take such rows"):
        measured(small_model(), narrow)


def test_layers_that_mix_examples_in_evaluation_are_measured_one_by_one() -> None:
    """As in training: without statistics a layer uses those of the batch."""
    torch.manual_seed(0)
    on = without_running_statistics(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    data = PublicData(TensorDataset(torch.randn(6, 4).double()), lambda model, x: model(x).square().sum(1))
    in_training = measured(on, data)
    assert measured(on.eval(), data) == pytest.approx(in_training)


def test_what_is_not_finite_is_left_out() -> None:
    on, x = small_model(), rows(6)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    clean = PublicData(TensorDataset(torch.cat([x[:2], x[3:]])), loss)
    found = measured(on, PublicData(TensorDataset(spoiled), loss))
    assert found == pytest.approx(measured(on, clean), rel=1e-9)
    nothing = measured(on, PublicData(TensorDataset(x * torch.nan), loss))
    assert all(e != e for e in nothing.values())


class Awkward(nn.Module):
    """Batch norm, dropout and a buffer that counts: whatever a forward pass can leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(1))
        self.also = nn.Module()
        self.also.register_buffer("calls", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        return self.last(x * (1 + 0.0 * float(np.random.rand()) + 0.0 * random.random()))


@pytest.mark.parametrize("of", ["example", "microbatch"])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_run_is_touched(of: str, training: bool) -> None:
    on = Awkward().double().train(training)
    on.also.calls = on.calls  # one buffer, two names
    for p in on.parameters():
        p.grad = torch.ones_like(p)
    before = {name: (b, b._version, b.clone()) for name, b in on.named_buffers()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    norms = measured(on, public(), of)
    assert all(e > 0 for e in norms.values())
    for name, b in on.named_buffers():
        kept, version, value = before[name]
        assert b is kept and b._version == version and torch.equal(b, value)
    assert on.also.calls is on.calls
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1] and (np.random.get_state()[1] == generators[2]).all()
    assert all(bool((p.grad == 1).all()) for p in on.parameters())
    assert on.training is training
    torch.rand(3)
    assert measured(on, public(), of) == norms  # to the last bit: a resumed run continues exactly


def test_buffers_come_back_even_if_the_loss_fails() -> None:
    on = Awkward().double()
    kept = on.calls

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        measured(on, PublicData(TensorDataset(rows(4)), failing))
    assert on.calls is kept and float(kept) == 0


def test_where_a_layer_mixes_examples_the_gradient_is_that_of_one_loss_in_its_batch() -> None:
    torch.manual_seed(0)
    on = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = rows(5)
    found = measured(on, PublicData(TensorDataset(x), loss))
    for h, names in group_parameters("layer", trainable(on)).items():
        parameters = [trainable(on)[n] for n in names]
        each = [torch.autograd.grad(losses(on, (x,))[i], parameters) for i in range(5)]
        expected = sum(float(torch.cat([g.flatten() for g in one]).norm()) for one in each) / 5
        assert found[h] == pytest.approx(expected, rel=1e-9)
