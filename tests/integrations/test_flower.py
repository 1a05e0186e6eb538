"""Federated averaging with Flower's own messages and clients, on a grid in this process."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise

pytest.importorskip("flwr", reason="Flower has an environment of its own: make test-integrations")
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from clipwise.integrations.flower import PrivateFedAvg
from clipwise.ledger.ledger import read
from tests.integrations.flower_grid import LocalGrid

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

CLIENTS, FEATURES, CLASSES = 12, 5, 3
FAILING = {4}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def rows_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(client)
    return torch.randn(6, FEATURES, generator=random), torch.randint(0, CLASSES, (6,), generator=random)


def train_locally(model: nn.Module, client: int) -> None:
    x, y = rows_of(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    if client in FAILING:
        return Message(Error(code=1, reason="out of memory"), reply_to=message)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_locally(model, client)
    metrics = MetricRecord({"train_loss": 0.5, "num-examples": 6})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def weights_of(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return dict(arrays.to_torch_state_dict())


def test_rounds_equal_the_plain_loop_over_users() -> None:
    model = network()
    strategy = PrivateFedAvg(model, clients=CLIENTS, max_norm=0.2, sample_rate=0.5, noise_multiplier=1.0, seed=3)
    result = strategy.start(LocalGrid(app, CLIENTS), ArrayRecord(network().state_dict()), num_rounds=4)

    def local_update(copy: nn.Module, client: torch.Tensor) -> Any:
        if int(client) in FAILING:
            return {}
        return train_locally(copy, int(client))

    other = network()
    private = clipwise.make_private(
        other, torch.optim.SGD(other.parameters(), lr=1.0), list(range(CLIENTS)), group=range(CLIENTS), sample_rate=0.5,
        noise_multiplier=1.0, seed=3, clipping=clipwise.Batch(max_norm=0.2, local_update=local_update),
    )  # fmt: skip
    while private.steps < 4:
        for piece in next(iter(private.loader)):
            private.step_local_update(piece)
    for name, value in weights_of(result.arrays).items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert strategy.private.steps == 4
    assert strategy.private.spent(delta=1e-3).unit is clipwise.Unit.USER
    assert not result.train_metrics_clientapp and not result.evaluate_metrics_clientapp


def test_a_budget_is_planned_for_the_rounds_and_evaluation_runs_on_the_server() -> None:
    model = network()
    strategy = PrivateFedAvg(model, clients=CLIENTS, sample_rate=0.5, epsilon=5.0, delta=1e-2)
    result = strategy.start(
        LocalGrid(app, CLIENTS), ArrayRecord(network().state_dict()), num_rounds=3,
        evaluate_fn=lambda number, arrays: MetricRecord({"public_accuracy": 0.5}),
    )  # fmt: skip
    assert 4.0 < strategy.private.spent().epsilon <= 5.0
    assert len(result.evaluate_metrics_serverapp) == 4
    strategy.private.statement()


def test_no_client_changes_the_weights_by_more_than_its_bound() -> None:
    class Liar(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if not reply.has_error():
                    large = {k: v + 1e6 for k, v in weights_of(reply.content["arrays"]).items()}
                    reply.content["arrays"] = ArrayRecord(large)
            return replies

    start = network().state_dict()
    strategy = PrivateFedAvg(network(), clients=CLIENTS, max_norm=0.1, sampling="full", noise_multiplier=0)
    found = weights_of(strategy.start(Liar(app, CLIENTS), ArrayRecord(start), num_rounds=1).arrays)
    change = torch.cat([(found[name] - start[name]).flatten() for name in start]).norm()
    assert float(change) == pytest.approx(0.1 * (CLIENTS - len(FAILING)) / CLIENTS, rel=1e-3)


def test_a_round_without_clients_releases_noise() -> None:
    start = network().state_dict()
    strategy = PrivateFedAvg(network(), clients=CLIENTS, sample_rate=1e-6, noise_multiplier=1.0)
    found = weights_of(strategy.start(LocalGrid(app, CLIENTS), ArrayRecord(start), num_rounds=1).arrays)
    assert strategy.private.steps == 1 and not torch.equal(found["weight"], start["weight"])


@pytest.mark.parametrize(
    "name",
    ["fraction_train", "min_train_nodes", "min_available_nodes", "weighted_by_key", "train_metrics_aggr_fn",
     "fraction_evaluate", "min_evaluate_nodes", "evaluate_metrics_aggr_fn"],
)  # fmt: skip
def test_settings_of_fedavg_that_are_not_private_are_refused(name: str) -> None:
    with pytest.raises(clipwise.ConfigurationError, match=name):
        PrivateFedAvg(network(), clients=CLIENTS, **{name: 1})


def test_a_strategy_around_it_is_refused() -> None:
    inner = PrivateFedAvg(network(), clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0)
    outer = DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 6)
    with pytest.raises(clipwise.StepError, match="Do not wrap"):
        outer.start(LocalGrid(app, CLIENTS), ArrayRecord(network().state_dict()), num_rounds=1)


def test_an_evaluation_on_clients_is_refused() -> None:
    strategy = PrivateFedAvg(network(), clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0)
    with pytest.raises(clipwise.ConfigurationError, match="evaluate_fn"):
        strategy.start(
            LocalGrid(app, CLIENTS), ArrayRecord(network().state_dict()), evaluate_config=ConfigRecord({"lr": 1.0})
        )


def test_the_server_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "flower.md").read_text()
    (block,) = re.findall(r'```python title="server.py"\n(.*?)```', page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "server.py", "exec"), names)
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    grid = LocalGrid(client, 100)
    names["app"](grid, Context(1, 1, {}, RecordDict(), {}))
    assert sum(entry.count for entry in read("run/ledger").history) == 10
