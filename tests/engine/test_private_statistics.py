"""Private runs that release running statistics: evaluation, statement, ledger, stop and resume."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from clipwise import Batch, NoisedStatistics, PerExample, Private, layers
from clipwise.contrib import RandomLayer
from clipwise.engine import checkpoint
from clipwise.errors import UnsupportedModelError
from clipwise.layers import BatchStatisticsNorm
from clipwise.privacy import effective_multiplier
from clipwise.report import statement
from tests.runs import CLASSES, FEATURES, HIDDEN, data, losses_of, private_run, same, sgd, train

RULE = NoisedStatistics(0.5, momentum=0.2, share=0.25)
USERS = [i % 7 for i in range(40)]


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    layers.without_running_statistics(model)
    return model


def begin(k: int = 4, rule: NoisedStatistics | None = RULE, **options: Any) -> tuple[nn.Module, Private]:
    parts = options.pop("parts", "all")
    return private_run(
        normalized(), clipping=Batch(0.5, k, parts=parts, running_statistics=rule), **{"seed": 1, **options}
    )


def layer_of(model: nn.Module) -> BatchStatisticsNorm:
    (layer,) = (m for m in model.modules() if isinstance(m, BatchStatisticsNorm))
    return layer


@pytest.mark.parametrize("options", [{}, {"k": 1, "group": USERS, "batch_size": 3}, {"parts": RandomLayer()}])
def test_the_multiplier_is_that_of_all_parts_together(options: dict[str, Any]) -> None:
    _, private = begin(noise_multiplier=1.7, **options)
    parts = private.parts()
    assert [p.name for p in parts if not p.parameters] == ["statistics of 1"]
    assert private.noise_multiplier == pytest.approx(1.7, rel=1e-9)
    assert effective_multiplier(parts) >= private.noise_multiplier
    of_layer = next(p for p in parts if not p.parameters)
    assert of_layer.noise_std == pytest.approx(1.7 / 0.25**0.5 * of_layer.sensitivity, rel=1e-9)
    assert of_layer.sensitivity == (0.5 if "group" in options else 1.0)


def test_the_noise_on_the_statistics_has_the_stated_size() -> None:
    """In an empty batch u and w are noise alone, over the number of microbatches."""
    model = nn.Sequential(layers.without_running_statistics(nn.BatchNorm1d(3000)), nn.Linear(3000, CLASSES))
    rows = TensorDataset(torch.randn(40, 3000), torch.zeros(40, dtype=torch.long))
    _, private = private_run(
        model,
        dataset=rows,
        clipping=Batch(0.5, 4, running_statistics=NoisedStatistics(1e-3, momentum=0.5, share=0.25)),
        noise_multiplier=2.0,
        seed=2,
    )
    train(model, private, 1)
    layer = layer_of(model)
    noise = torch.cat([layer.running_mean, layer.running_var.log()]) / 0.5
    assert float(noise.std()) == pytest.approx(2.0 / 0.5 * 2e-3 / 4, rel=0.04)


def test_buffers_change_once_a_release_and_evaluation_uses_them() -> None:
    model, private = begin()
    layer, x = layer_of(model), data().tensors[0]
    before = copy.deepcopy(layer.state_dict())
    pieces = iter(private.loader.pieces())
    for batch in pieces:
        done = private.step(losses_of(model, batch))
        assert torch.equal(layer.running_mean, before["running_mean"]) == (not done)
        if done:
            break
    assert int(layer.num_batches_tracked) == 1
    model.eval()
    torch.testing.assert_close(torch.cat([model(row[None]) for row in x]), model(x))
    model.train()
    train(model, private, 3)
    assert int(layer.num_batches_tracked) == 4
    plain = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    plain.load_state_dict(model.state_dict())  # what is exported is an ordinary batch norm
    torch.testing.assert_close(plain.eval()(x), model.eval()(x))


@pytest.mark.parametrize("parts", ["all", RandomLayer()])
def test_the_mean_is_over_microbatches_whatever_the_gradient_is_divided_by(parts: Any) -> None:
    """Without noise and with equal microbatches, the statistics are those of one microbatch."""
    x = torch.full((40, FEATURES), 0.2)
    rows = TensorDataset(x, torch.zeros(40, dtype=torch.long))
    model = nn.Sequential(
        layers.without_running_statistics(nn.BatchNorm1d(FEATURES, affine=False)),
        nn.Linear(FEATURES, 4),
        nn.Linear(4, CLASSES),
    )
    rule = NoisedStatistics(100.0, momentum=0.5)
    clipping = Batch(0.5, 4, parts=parts, running_statistics=rule)
    _, private = private_run(model, dataset=rows, clipping=clipping, sampling="full", noise_multiplier=0)
    train(model, private, 1)
    torch.testing.assert_close(layer_of(model).running_mean, torch.full((FEATURES,), 0.5 * 0.2))


def test_an_empty_batch_releases_noise_and_counts() -> None:
    model, private = begin(batch_size=None, sample_rate=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, private, 1)
    assert private.steps == 1 and int(layer_of(model).num_batches_tracked) == 1
    assert bool(layer_of(model).running_mean.any())


def test_the_statement_and_the_ledger_name_them(tmp_path: Path) -> None:
    model, private = begin(ledger=tmp_path / "run.ledger", delta=1e-5)
    train(model, private, 2)
    found = private.statement()
    text = str(found)
    assert "and the clipped statistics of 1 batch norm layer with noise multiplier" in text
    assert "noised statistics of batch norm layers" in text
    assert "statistics of 1: 1" in text and "counts" not in text.split("accountant")[0].split("releases")[1]
    assert found.to_dict()["strategy"]["running_statistics"] == {"max_norm": 0.5, "momentum": 0.2, "share": 0.25}
    private.close()
    read = statement.of_ledger(tmp_path / "run.ledger", 1e-5)
    assert [p.name for p in read.about.parts or ()] == ["all", "statistics of 1"]
    assert "statistics of 1 batch norm layer" in str(read)


def test_without_them_the_statement_does_not_mention_statistics() -> None:
    model, private = begin(rule=None)
    train(model, private, 1)
    assert "statistics" not in str(private.statement())


def test_a_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """The buffers are saved with the model; the rest is in the checkpoint and the resume file."""
    whole, private = begin()
    train(whole, private, 6)
    model, private = begin(ledger=tmp_path / "run.ledger")
    train(model, private, 3)
    checkpoint.save(tmp_path / "private.pt", private.state_dict())
    weights = copy.deepcopy(model.state_dict())
    private.close()
    model, private = begin(ledger=tmp_path / "run.ledger")
    model.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.load_state_dict(checkpoint.load(tmp_path / "private.pt"))
    train(model, private, 3)
    private.close()
    assert same(model.state_dict(), whole.state_dict())
    assert int(layer_of(model).num_batches_tracked) == 6


def test_another_rule_is_another_configuration() -> None:
    prints = {
        begin(rule=rule)[1].state_dict()["fingerprint"]
        for rule in (None, RULE, NoisedStatistics(0.4, momentum=0.2, share=0.25))
    }
    assert len(prints) == 3


def test_they_begin_where_public_data_left_them() -> None:
    """Learned statistics start from the values in the buffers."""
    model = normalized()
    layers.recompute_statistics(model, [torch.randn(64, FEATURES)])
    model.train()
    before = layer_of(model).running_mean.clone()
    clipping = Batch(0.5, 4, running_statistics=NoisedStatistics(1e-9, momentum=0.1))
    _, private = private_run(model, clipping=clipping, seed=1)
    train(model, private, 2)
    torch.testing.assert_close(layer_of(model).running_mean, before, rtol=1e-5, atol=1e-5)


def test_per_example_clipping_still_refuses_batch_norm() -> None:
    for model in (normalized(), nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))):
        with pytest.raises(UnsupportedModelError, match="mixes the examples of a batch"):
            private_run(model, clipping=PerExample(1.0))


def test_the_refusal_of_ordinary_layers_names_the_alternatives() -> None:
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(UnsupportedModelError, match=r"running_statistics=NoisedStatistics\(\)"):
        private_run(model, clipping=Batch(1.0, running_statistics=RULE))


def test_other_optimizers_views_and_the_compiled_step() -> None:
    """The compiled step is an ordinary one here: what it releases is the same."""
    found = []
    for is_compiled in (False, True):
        model = normalized()
        clipping = Batch(0.5, 2, running_statistics=RULE)
        _, private = private_run(
            model, sgd(model, momentum=0.9), clipping=clipping, augmentation_multiplicity=2, seed=4
        )
        step = private.compiled(lambda x, y, model=model: losses_of(model, (x, y))) if is_compiled else None
        for batch in private.loader.pieces():
            _ = private.step(losses_of(model, batch)) if step is None else step(*batch)
        found.append(model.state_dict())
    assert same(*found)
