"""Clipped local updates of clients that add the noise themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clipwise.clipping.base import Clipper, Site, StatementText
from clipwise.clipping.batch import Batch
from clipwise.errors import ConfigurationError
from clipwise.privacy import Sampling, Unit
from clipwise.validation.arguments import whole


@dataclass(frozen=True)
class NoiseShares(Batch):
    """`Batch` with a local update, where the clients clip and each of them adds a share of the noise.

    With the noise s of a step, n clients, d dropouts and c colluding clients, the variance of a share is
    s^2 / (n - d - c). Every client sends a share in every step, whether it was drawn or not. The server adds the shares
    of the clients that do not answer. So the noise of a released sum always has the variance n s^2 / (n - d - c).

    The variance must be constant: if only drawn clients sent a share, it would grow with the size of the draw, and in a
    model with many parameters anyone could compute that size, and so whether a client was drawn.

    Args:
        clients: n, the number of all clients.
        dropouts: d, the most clients that do not answer in a step. It matters only against a party that sees the sums
            before the server adds the missing shares.
        colluding: c, the most clients that pool their own shares to subtract them. Above 0 it needs Poisson sampling or
            full batches: under the other schemes their own draws tell something about those of others.

    Guarantee:
        - Adjacency and sensitivity of the released models: those of `Batch` with users. They hold against readers of
          all models, and against c clients that read them too, for any number of dropouts.
        - Assumptions: the server follows the protocol, keeps draws and messages secret, and does not read them.
        - Against a server that reads single messages, a client has the noise of its own share, and the draw does not
          amplify. Against a party that sees only the sums of the messages, a step has at least the noise s, without
          amplification, if at least n - d clients answer and their answering does not depend on their data.
        - A server or clients that deviate from the protocol to weaken the noise are not covered.
    """

    clients: int = 1
    dropouts: int = 0
    colluding: int = 0

    name = "noise-shares"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("clients", self.clients, least=1)
        whole("dropouts", self.dropouts, least=0)
        whole("colluding", self.colluding, least=0)
        if self.honest < 1:
            raise ConfigurationError(
                "dropouts and colluding must leave at least one of the clients, whose share is the noise of the step: "
                "give smaller numbers."
            )

    @property
    def honest(self) -> int:
        """n - d - c, the number of clients whose shares are enough noise."""
        return self.clients - self.dropouts - self.colluding

    def attach(self, site: Site) -> Clipper:
        if self.colluding and site.scheme.sampling not in (Sampling.POISSON, Sampling.FULL):
            raise ConfigurationError(
                f"colluding above 0 is not supported with sampling={str(site.scheme.sampling)!r}: clients that were "
                "not drawn know that others are more likely to be. Use 'poisson' or 'full'."
            )
        return super().attach(site)

    def describe(self) -> dict[str, Any]:
        counts = {"clients": self.clients, "dropouts": self.dropouts, "colluding": self.colluding}
        return super().describe() | counts

    @classmethod
    def statement_text(cls, recorded: Mapping[str, Any], unit: Unit) -> StatementText:
        text = super().statement_text(recorded, unit)
        clients, dropouts, colluding = (recorded.get(k) for k in ("clients", "dropouts", "colluding"))
        trust = (
            f"distributed noise: each of {clients} clients clips its own update and adds a share of the noise from a "
            f"random key of its own. The other shares are enough without those of {dropouts} clients that do not "
            f"answer and {colluding} that collude",
            "the server is trusted: it adds the shares of clients that do not answer, and keeps the draws and the "
            "messages of the clients secret. Against a server that reads them, epsilon does not hold: each client then "
            "has only the noise of its own share, without amplification by sampling",
        )
        return replace(text, assumptions=(*text.assumptions, *trust))
