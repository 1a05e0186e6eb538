"""Federated averaging with Flower under client-level differential privacy.

`PrivateFedAvg` is a strategy for the `ServerApp`; the `ClientApp` stays as it is. The server draws the clients, clips
the change of the weights that each of them returns, and adds the noise. The clients trust the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from clipwise.clipping import Batch
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import ConfigurationError, StepError


class PrivateFedAvg(Strategy):  # type: ignore[misc]
    """Federated averaging whose global models are private, with a client as the unit of privacy.

    A round is one step of a private run. Each client takes part with probability `sample_rate`, and its change of the
    weights is clipped to `max_norm`. The noised sum is divided by the expected number of clients in a round. A client
    that fails or does not answer contributes 0.

    Every client has the same weight: the number of its examples is private. Metrics that clients return are discarded
    and clients do not evaluate, since their numbers are not noised. `evaluate_fn` of `start` runs on the server: give
    it public data.

    Args:
        model: the global model. `start` loads `initial_arrays` into it.
        clients: the number of clients, which is public. `start` waits until as many nodes are connected.
        max_norm: the clipping norm of the change that one client returns.
        optimizer: a function from parameters to the optimizer of the server. Its gradient is minus the mean change. The
            default is SGD with learning rate 1, which is federated averaging.
        arrayrecord_key, configrecord_key: the keys of the message that clients get, as in Flower's strategies.
        options: further arguments of `clipwise.make_private`: `sample_rate` or `batch_size` (of clients in a round),
            `epsilon` and `delta` or `noise_multiplier`, `ledger`, and others. By default `steps` is the number of
            rounds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clients: int,
        max_norm: float = 1.0,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        **options: Any,
    ) -> None:
        for name, reason in _REPLACED.items():
            if name in options:
                raise ConfigurationError(f"PrivateFedAvg takes no {name}=: {reason}.")
        self._model, self._clients, self._options = model, clients, options
        self._strategy = Batch(max_norm=max_norm, local_update=self._change)
        self._make_optimizer = optimizer
        self._keys = arrayrecord_key, configrecord_key
        self._private: Private | None = None
        self._nodes: list[int] = []
        self._returned: dict[int, dict[str, Tensor]] = {}  # the weights of this round, by the index of the client

    @property
    def private(self) -> Private:
        """The private run, with `spent()` and `statement()`."""
        if self._private is None:
            raise StepError(
                "The private run begins with strategy.start(...) of PrivateFedAvg itself. Do not wrap it in another "
                "strategy, such as one of Flower that adds noise: it has its own."
            )
        return self._private

    def summary(self) -> None:
        """Nothing: Flower logs the arguments of `start`."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **options: Any) -> Result:
        """Train for a number of rounds, as `Strategy.start` of Flower does."""
        if self._private is not None:
            raise ConfigurationError("start() was called before: make a new PrivateFedAvg, with the same ledger=.")
        if options.get("evaluate_config") is not None:
            raise ConfigurationError(
                "evaluate_config is for an evaluation on the clients, whose results would not be private: give "
                "evaluate_fn=, which runs on the server, with public data."
            )
        self._model.load_state_dict(initial_arrays.to_torch_state_dict())
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        make = self._make_optimizer
        self._private = make_private(
            self._model,
            torch.optim.SGD(parameters, lr=1.0) if make is None else make(parameters),
            list(range(self._clients)),
            group=range(self._clients),
            clipping=self._strategy,
            **{"steps": num_rounds, **self._options},
        )
        while len(nodes := sorted(grid.get_node_ids())) < self._clients:
            time.sleep(1.0)
        self._nodes = nodes[: self._clients]
        with self._private:
            return super().start(grid, initial_arrays, num_rounds, *args, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        record = RecordDict(dict(zip(self._keys, (arrays, config), strict=True)))
        drawn = [int(i) for indices in self.private.loader.upcoming() for i in indices]
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=self._nodes[client]) for client in drawn
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        clients = {node: client for client, node in enumerate(self._nodes)}
        for reply in replies:
            if not reply.has_error():
                (arrays,) = reply.content.array_records.values()
                self._returned[clients[reply.metadata.src_node_id]] = arrays.to_torch_state_dict()
        for piece in next(iter(self.private.loader)):
            self.private.step_local_update(piece)
        self._returned.clear()
        return ArrayRecord(self._model.state_dict()), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def _change(self, model: nn.Module, client: Tensor) -> dict[str, Tensor]:
        """The change of the weights that a client returned; none if it did not answer."""
        returned = self._returned.get(int(client))
        if returned is None:
            return {}
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if missing := own.keys() - returned.keys():
            raise StepError(f"A client returned no value of the parameter {min(missing)!r}: return the whole model.")
        return {name: returned[name].to(p.device) - p.detach() for name, p in own.items()}


_EVALUATED = "results on the data of clients would not be private; use evaluate_fn= with public data"
_REPLACED = {
    "fraction_train": "give sample_rate=, the probability that a client takes part in a round",
    "min_train_nodes": "the draw of the clients is accounted and cannot be changed afterwards",
    "min_available_nodes": "give clients=, the number of all clients, which start() waits for",
    "weighted_by_key": "the number of examples of a client is private, so every client has the same weight",
    "train_metrics_aggr_fn": "metrics that clients return are not private and are discarded",
    "fraction_evaluate": _EVALUATED,
    "min_evaluate_nodes": _EVALUATED,
    "evaluate_metrics_aggr_fn": _EVALUATED,
}
