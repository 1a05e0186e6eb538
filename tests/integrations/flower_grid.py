"""A grid of Flower clients that run in this process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid


class LocalGrid(Grid):
    """Delivers each message to a `ClientApp`, whose context holds the number of the client as `partition-id`."""

    def __init__(self, app: ClientApp, clients: int) -> None:
        self._app = app
        self._contexts = {
            100 + i: Context(1, 100 + i, {"partition-id": i, "num-partitions": clients}, RecordDict(), {})
            for i in range(clients)
        }
        with suppress(ModuleNotFoundError):  # newer versions of Flower read the sender of a message
            identity = import_module("flwr.supercore.task_identity").TaskIdentity
            identity.task_id, identity.run_id, identity.node_id = 1, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self._app(message, self._contexts[message.metadata.dst_node_id]) for message in messages]

    run: Any = None

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError
