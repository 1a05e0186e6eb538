"""Federated averaging with Flower where the clients add the noise.

`DistributedFedAvg` is a strategy for the `ServerApp`, and `add_noise_share` a mod for the `ClientApp`. The letters are
those of `NoiseShares`: n clients, d dropouts, c colluding clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor, nn

from clipwise import accounting
from clipwise.clipping import NoiseShares
from clipwise.engine import external_sum
from clipwise.errors import ConfigurationError, StepError
from clipwise.integrations.flower import PrivateFedAvg
from clipwise.noise.gaussian import gaussian
from clipwise.noise.shares import noised_share, on_grid, share_std
from clipwise.privacy import Entry, Event, Sampling
from clipwise.validation.arguments import one_of

_SETTINGS, _CHANGE = "clipwise.noise-share", "clipwise.change"


def add_noise_share(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of a `ClientApp` that clips the change of the weights and adds the client's share of the noise.

        app = ClientApp(mods=[add_noise_share])

    A client that is not drawn, or whose training fails with an error message, sends its share alone. Metrics are not
    sent. The client trusts the clipping norm and the standard deviation that the server sends.
    """
    if not str(message.metadata.message_type).startswith(str(MessageType.TRAIN)):
        return call_next(message, context)
    if _SETTINGS not in message.content:
        raise StepError("add_noise_share is for clients of DistributedFedAvg: use that strategy in the ServerApp.")
    settings: Any = message.content.pop(_SETTINGS)
    (arrays,) = message.content.array_records.values()
    before = arrays.to_torch_state_dict()
    change = {name: torch.zeros_like(before[name]) for name in settings["names"]}
    if settings["is_drawn"]:
        reply = call_next(message, context)
        if not reply.has_error():
            (returned,) = reply.content.array_records.values()
            after = returned.to_torch_state_dict()
            if missing := change.keys() - after.keys():
                raise StepError(f"The client returned no value of the parameter {min(missing)!r}: return all of them.")
            change = {name: after[name].double() - before[name].double() for name in change}
    noised = noised_share(change, settings["max_norm"], settings["std"])
    return Message(RecordDict({_CHANGE: ArrayRecord(noised)}), reply_to=message)


class DistributedFedAvg(PrivateFedAvg):
    """`PrivateFedAvg` where each client clips and adds a share of the noise before it sends anything.

    Every `ClientApp` needs the mod `add_noise_share`. In every round all clients answer, and those that are not drawn
    send noise alone: the noise of a round must not depend on the draw. The server adds the shares of clients that do
    not answer. The ledger is charged before a client is asked.

    The released models have the epsilon of the ledger, also against `colluding` clients that know their own shares.
    The server must be trusted not to use the messages: it gets each of them, without secure aggregation, and knows the
    draw. `epsilon_against_server` is what a client has if the server reads them. See `NoiseShares`.

    Args:
        model, clients, max_norm, options: as for `PrivateFedAvg`. noise="secure" is not supported.
        dropouts: the most clients that do not answer in a round. More are covered by the server's noise; the guarantee
            against a party that sees the sums alone is then lost.
        colluding: the most clients that pool their shares.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clients: int,
        dropouts: int = 0,
        colluding: int = 0,
        max_norm: float = 1.0,
        **options: Any,
    ) -> None:
        if options.get("noise", "standard") != "standard":
            raise ConfigurationError(
                "noise='secure' is not supported by DistributedFedAvg, whose clients draw standard noise: leave it "
                "out, or use PrivateFedAvg."
            )
        if any(p.is_complex() for p in model.parameters()):
            raise ConfigurationError("DistributedFedAvg does not support complex parameters: use PrivateFedAvg.")
        super().__init__(model, clients=clients, max_norm=max_norm, **options)
        self._shares = NoiseShares(
            max_norm=max_norm, local_update=self._change, clients=clients, dropouts=dropouts, colluding=colluding
        )
        self._strategy, self._max_norm = self._shares, float(max_norm)
        self._fewest_answers = clients

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        run = self.private._context
        drawn = set(external_sum.draw(run))
        settings = {"names": list(run.parameters), "max_norm": self._max_norm, "std": self._share_std()}
        messages = []
        for client, node in enumerate(self._nodes):
            own = ConfigRecord({**settings, "is_drawn": client in drawn})
            record = RecordDict({self._keys[0]: arrays, self._keys[1]: deepcopy(config), _SETTINGS: own})
            messages.append(Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        run = self.private._context
        answers: dict[int, Tensor] = {}  # noised changes, flat, by the node
        for reply in replies:
            if reply.has_error():
                continue
            if _CHANGE not in reply.content:
                raise StepError("A client answered without its noise: give ClientApp(mods=[add_noise_share]).")
            if (change := _flat(reply.content[_CHANGE].to_torch_state_dict(), run.parameters)) is not None:
                answers[reply.metadata.src_node_id] = change
        self._fewest_answers = min(self._fewest_answers, len(answers))
        external_sum.release(run, lambda: self._released(list(answers.values())))
        return ArrayRecord(self._model.state_dict()), None

    def epsilon_against_server(self, delta: float, sees: str = "messages") -> float:
        """The epsilon of one client, over the rounds so far, against a server that knows the draws.

        For the operator of the server: with "sums" it depends on the number of answers, which epsilon does not cover.

        Args:
            delta: of this guarantee.
            sees: "messages": the server reads each message, as it can here. "sums": it reads only the sum of a round,
                which needs secure aggregation by other means; infinite if a round had fewer than n - d answers.
        """
        run, shares = self.private._context, self._shares
        event = run.event
        is_sum = one_of("sees", sees, ("messages", "sums")) == "sums"
        if is_sum and self._fewest_answers < shares.clients - shares.dropouts:
            return math.inf
        z = event.noise_multiplier / (1.0 if is_sum else math.sqrt(shares.honest))
        seen = Event(Sampling.FULL, event.adjacency, event.unit, z, 1.0)
        return accounting.epsilon_of([Entry(seen, run.made())], delta) if run.made() else 0.0

    def _share_std(self) -> float:
        (part,) = self.private._context.parts
        return share_std(part.noise_std, self._shares.honest)

    def _released(self, answers: list[Tensor]) -> dict[str, Tensor]:
        """Minus the noised sum over the divisor, by parameter. The shares of the missing clients are added."""
        run = self.private._context
        total = torch.zeros(sum(p.numel() for p in run.parameters.values()), dtype=torch.float64)
        for answer in answers:
            total += answer
        std, missing = self._share_std(), self._shares.clients - len(answers)
        if std > 0 and missing:
            secret = run.keys.key.derive("noise/missing-shares")
            total += on_grid(gaussian(secret, len(total), std * math.sqrt(missing), dtype=torch.float64), std)
        total /= -run.clipper.divisor
        pieces = torch.split(total, [p.numel() for p in run.parameters.values()])
        named = zip(run.parameters.items(), pieces, strict=True)
        return {name: piece.view(p.shape).to(p.device) for (name, p), piece in named}


def _flat(change: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> Tensor | None:
    """The answer of a client as one vector; None if it does not fit the model, which counts as no answer."""
    if any(name not in change or change[name].shape != p.shape for name, p in parameters.items()):
        return None
    flat = torch.cat([change[name].flatten().double() for name in parameters])
    return flat if bool(flat.isfinite().all()) else None
