"""Federated averaging with Flower where the clients add the noise, on a grid in this process."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import clipwise

pytest.importorskip("flwr", reason="Flower has an environment of its own: make test-integrations")
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from clipwise.integrations.flower import PrivateFedAvg
from clipwise.integrations.flower_distributed import DistributedFedAvg, add_noise_share
from clipwise.ledger.ledger import read
from tests.integrations import test_flower as central
from tests.integrations.flower_grid import LocalGrid

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

CLIENTS, ROUNDS, NORM, Z = 8, 3, 0.5, 2.0
CHANGE = "clipwise.change"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(200, 50)


def flat(arrays: ArrayRecord) -> Tensor:
    return torch.cat([v.flatten().double() for _, v in sorted(arrays.to_torch_state_dict().items())])


idle = ClientApp(mods=[add_noise_share])
trained = ClientApp(mods=[add_noise_share])
bare = ClientApp()
trained.train()(central.train)


@idle.train()
@bare.train()
def return_the_weights(message: Message, context: Context) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


class Grid(LocalGrid):
    """Keeps what clients receive and send. Some of them do not answer, and some send values that are not finite."""

    def __init__(self, app: ClientApp, dropped: Iterable[int] = (), broken: Iterable[int] = ()) -> None:
        super().__init__(app, CLIENTS)
        self.dropped, self.broken = {100 + i for i in dropped}, {100 + i for i in broken}
        self.asked: list[list[Message]] = []
        self.sent: list[dict[int, Tensor]] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        self.asked.append(messages := list(messages))
        replies = list(super().send_and_receive(messages, timeout=timeout))
        kept = [r for r in replies if r.metadata.src_node_id not in self.dropped]
        self.sent.append({r.metadata.src_node_id - 100: flat(r.content[CHANGE]) for r in kept if not r.has_error()})
        for reply in kept:
            if reply.metadata.src_node_id in self.broken:
                damaged = {k: v * math.nan for k, v in reply.content[CHANGE].to_torch_state_dict().items()}
                reply.content[CHANGE] = ArrayRecord(damaged)
        return kept


def noise_of(grid: Grid, rounds: int = 1, **options: Any) -> tuple[DistributedFedAvg, list[Tensor]]:
    """The changes of the weights in each round, times the divisor. The clients' own changes are 0."""
    strategy = DistributedFedAvg(
        wide(), clients=CLIENTS, max_norm=NORM, **{"noise_multiplier": Z, "sample_rate": 0.5, **options}
    )
    seen: list[Tensor] = []
    strategy.start(
        grid, ArrayRecord(wide().state_dict()), num_rounds=rounds, evaluate_fn=lambda _, a: seen.append(flat(a))
    )
    return strategy, [(b - a) * strategy.private.divisor for a, b in pairwise(seen)]


def require_variance(values: Tensor, variance: float) -> None:
    """A two-sided chi-square test at 1e-6."""
    cdf = stats.chi2.cdf(float((values**2).sum()) / variance, values.numel())
    assert 5e-7 < cdf < 1 - 5e-7


def test_without_noise_it_equals_the_central_run() -> None:
    found = []
    for kind, app in ((PrivateFedAvg, central.app), (DistributedFedAvg, trained)):
        strategy = kind(central.network(), clients=CLIENTS, max_norm=0.2, sample_rate=0.5, noise_multiplier=0, seed=3)
        start = ArrayRecord(central.network().state_dict())
        result = strategy.start(LocalGrid(app, CLIENTS), start, num_rounds=4)
        assert strategy.private.steps == 4
        found.append(flat(result.arrays))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found[0], flat(ArrayRecord(central.network().state_dict())))


@pytest.mark.parametrize("rate", [1e-6, 0.5, 1.0 - 1e-9])
@pytest.mark.parametrize("dropped", [(), (2,), (0, 3, 5), range(CLIENTS)])
def test_the_noise_does_not_depend_on_the_draw_or_on_dropouts(rate: float, dropped: Iterable[int]) -> None:
    _, (noise,) = noise_of(Grid(idle, dropped), sample_rate=rate, dropouts=2, colluding=1)
    require_variance(noise, (Z * NORM) ** 2 * CLIENTS / (CLIENTS - 3))


def test_colluding_clients_leave_the_noise_of_a_step() -> None:
    grid = Grid(idle)
    _, (noise,) = noise_of(grid, colluding=3)
    require_variance(noise - sum(grid.sent[0][client] for client in range(3)), (Z * NORM) ** 2)


def test_the_noise_left_in_a_sum_with_dropouts_is_that_of_a_step() -> None:
    grid = Grid(idle, dropped=(6, 7))
    noise_of(grid, dropouts=2, colluding=1)
    honest = [grid.sent[0][client] for client in range(1, 6)]
    require_variance(torch.stack(honest).sum(0), (Z * NORM) ** 2)


def test_shares_are_independent_between_clients_and_rounds() -> None:
    grid = Grid(idle)
    noise_of(grid, rounds=ROUNDS, seed=5)
    shares = torch.stack([share for sent in grid.sent for share in sent.values()])
    assert len(shares) == ROUNDS * CLIENTS
    correlations = torch.corrcoef(shares) - torch.eye(len(shares))
    assert float(correlations.abs().max()) < 6 / math.sqrt(shares.shape[1])


def test_the_servers_shares_are_independent_between_rounds() -> None:
    _, noise = noise_of(Grid(idle, range(CLIENTS)), rounds=ROUNDS)
    correlations = torch.corrcoef(torch.stack(noise)) - torch.eye(ROUNDS)
    assert float(correlations.abs().max()) < 6 / math.sqrt(len(noise[0]))


def test_an_answer_that_is_not_finite_counts_as_none() -> None:
    strategy, (noise,) = noise_of(Grid(idle, broken=(1, 4)))
    require_variance(noise, (Z * NORM) ** 2)
    assert strategy.epsilon_against_server(1e-3, sees="sums") == math.inf


def test_every_client_is_asked_and_a_failed_training_sends_noise() -> None:
    grid = Grid(trained)
    model = central.network()
    strategy = DistributedFedAvg(model, clients=CLIENTS, sampling="full", noise_multiplier=1.0)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    assert central.FAILING <= grid.sent[0].keys() == set(range(CLIENTS))
    assert all(share.any() for share in grid.sent[0].values())


def test_clients_send_nothing_else() -> None:
    (reply,) = trained_replies(1)
    assert list(reply.content) == [CHANGE]


def trained_replies(count: int) -> list[Message]:
    replies: list[Message] = []

    class Keeping(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies.extend(found := super().send_and_receive(messages, timeout=timeout))
            return found

    model = central.network()
    strategy = DistributedFedAvg(model, clients=count, sampling="full", noise_multiplier=1.0, delta=1e-2)
    strategy.start(Keeping(trained, count), ArrayRecord(model.state_dict()), num_rounds=1)
    return replies


def test_the_ledger_is_charged_before_a_client_is_asked(tmp_path: Path) -> None:
    path, counts = tmp_path / "ledger", []

    class Counting(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            counts.append(sum(entry.count for entry in read(path).history))
            raise OSError("the connection was lost")

    strategy = DistributedFedAvg(wide(), clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0, ledger=path)
    with pytest.raises(OSError, match="connection"):
        strategy.start(Counting(idle, CLIENTS), ArrayRecord(wide().state_dict()), num_rounds=2)
    assert counts[0] >= 1
    assert sum(entry.count for entry in read(path).history) == 1


def test_a_budget_ends_the_rounds_before_clients_are_asked() -> None:
    grid = Grid(idle)
    with pytest.raises(clipwise.BudgetExhausted):
        noise_of(grid, rounds=4, noise_multiplier=None, epsilon=3.0, delta=1e-2, steps=2)
    assert len([asked for asked in grid.asked if asked]) == 2  # Flower also asks no client to evaluate


def test_a_client_without_the_mod_is_refused() -> None:
    strategy = DistributedFedAvg(wide(), clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0)
    with pytest.raises(clipwise.StepError, match="mods"):
        strategy.start(LocalGrid(bare, CLIENTS), ArrayRecord(wide().state_dict()), num_rounds=1)


def test_the_mod_is_refused_by_other_strategies() -> None:
    strategy = PrivateFedAvg(wide(), clients=CLIENTS, sampling="full", noise_multiplier=1.0)
    with pytest.raises(clipwise.StepError, match="DistributedFedAvg"):
        strategy.start(LocalGrid(idle, CLIENTS), ArrayRecord(wide().state_dict()), num_rounds=1)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(clipwise.ConfigurationError, match="secure"):
        DistributedFedAvg(wide(), clients=CLIENTS, noise="secure")
    with pytest.raises(clipwise.ConfigurationError, match="complex"):
        DistributedFedAvg(nn.Linear(2, 2, dtype=torch.complex64), clients=CLIENTS)
    with pytest.raises(clipwise.ConfigurationError, match="colluding"):
        DistributedFedAvg(wide(), clients=CLIENTS, colluding=CLIENTS)
    with pytest.raises(clipwise.ConfigurationError, match="sampling='fixed-size'"):
        noise_of(Grid(idle), colluding=1, sampling="fixed-size", sample_rate=None, batch_size=4)
    noise_of(Grid(idle), sampling="fixed-size", sample_rate=None, batch_size=4)


def test_the_guarantee_against_the_server_is_that_of_single_shares() -> None:
    strategy, _ = noise_of(Grid(idle), rounds=2, dropouts=2, colluding=2)
    kind: dict[str, Any] = {"delta": 1e-3, "steps": 2, "sampling": "full", "adjacency": "zero-out"}
    of_messages = clipwise.accounting.epsilon(noise_multiplier=Z / math.sqrt(4), **kind)
    of_sums = clipwise.accounting.epsilon(noise_multiplier=Z, **kind)
    assert strategy.epsilon_against_server(1e-3) == pytest.approx(of_messages, rel=1e-6)
    assert strategy.epsilon_against_server(1e-3, sees="sums") == pytest.approx(of_sums, rel=1e-6)
    assert strategy.private.spent(delta=1e-3).epsilon < of_sums < of_messages


def test_the_statement_names_the_trust() -> None:
    strategy, _ = noise_of(Grid(idle), dropouts=1, colluding=2)
    text = " ".join(str(strategy.private.statement()).split())
    assert (
        f"each of {CLIENTS} clients clips its own update" in text
        and "1 clients that do not answer and 2 that collude" in text
    )
    assert "the server is trusted" in text and "sum of the clipped local updates of the users" in text


def test_the_client_and_the_server_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "flower.md").read_text()
    names: dict[str, Any] = {}
    for title in ("distributed_client.py", "distributed_server.py"):
        (block,) = re.findall(rf'```python title="{title}"\n(.*?)```', page, re.DOTALL)
        exec(compile(block, title, "exec"), names)
    names["server"](LocalGrid(names["client"], 100), Context(1, 1, {}, RecordDict(), {}))
    assert sum(entry.count for entry in read("run/ledger").history) == 10


def test_an_error_reply_is_a_dropout() -> None:
    class Failing(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            return [Message(Error(code=1, reason="lost"), reply_to=message) for message in messages]

    strategy = DistributedFedAvg(wide(), clients=CLIENTS, sample_rate=0.5, noise_multiplier=1.0, colluding=2)
    result = strategy.start(Failing(idle, CLIENTS), ArrayRecord(wide().state_dict()), num_rounds=1)
    noise = (flat(result.arrays) - flat(ArrayRecord(wide().state_dict()))) * strategy.private.divisor
    require_variance(noise, CLIENTS / (CLIENTS - 2))
