"""Typical norms e_h of the groups of a model's parameters: what policies choose their constants from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.measure import mean_norms
from clipwise.clipping.public import Public
from clipwise.errors import CheckpointError, ConfigurationError

OF = ("example", "mini-set")
_SMALLEST, _LARGEST = 1e-30, 1e30  # sums and noise of float32 are safe there
_FLOOR = 1e-3
_NOTHING = 1e-15  # norms are upper bounds: a gradient of 0 may show as 1e-18


@dataclass(frozen=True)
class Question:
    """Which norms are asked for.

    Args:
        site: where.
        groups: h -> its parameters.
        of: "example": mean norm of an example's gradient; "mini-set": mean norm of the mean over a mini-set.
        mini_set_size: for "mini-set"; by default the batch size of the public data.
    """

    site: Site
    groups: dict[str, list[str]]
    of: str = "example"
    mini_set_size: int | None = None


class Typical(ABC):
    """e_h of each group, all of them positive: at least a thousandth of the largest.

    A group whose gradient is 0 would otherwise get a bound of 0, and never be trained again.
    """

    norms: dict[str, float]

    def hear(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:  # noqa: B027 (most do not)
        """Of a release: the noised means by parameter, and the noise's standard deviation on each coordinate."""

    @abstractmethod
    def renew(self) -> bool:
        """Bring `norms` up to date. False, and they stay, if nothing can be told now."""

    def state_dict(self) -> dict[str, Any]:
        """What going on takes, in plain types. It is public."""
        return {"typical": dict(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to it; refuses what cannot have been."""
        norms = state.get("typical")
        if not (isinstance(norms, Mapping) and norms.keys() == self.norms.keys() and _are_norms(norms)):
            raise CheckpointError(
                "This state_dict of a private run is damaged: its typical norms are missing or out of range. Use the "
                "one saved before it."
            )
        self.norms = dict(norms)

    def _take(self, norms: Mapping[str, float]) -> bool:
        found = floored(norms)
        if found is None:
            return False
        self.norms = found
        return True


class Measured(Typical):
    """On public data, at the weights of the moment: those are released, so the norms are public."""

    def __init__(self, public: Public, question: Question) -> None:
        self._public, self._question = public, question
        if public.comes_in_batches and question.mini_set_size is not None:
            raise ConfigurationError(
                "mini_set_size: the public data comes in batches, which are the mini-sets."
            )
        if not self.renew():
            raise ConfigurationError(
                f"On the public data ({public.name}) every gradient is 0 or not finite, so typical norms cannot be "
                "measured: look at its loss."
            )

    def renew(self) -> bool:
        q = self._question
        found = mean_norms(self._public, q.site.model, q.site.parameters, q.groups, q.of, q.mini_set_size)
        return max(found.values()) > _NOTHING and self._take(found)


def floored(norms: Mapping[str, float]) -> dict[str, float] | None:
    """e_h, none below a thousandth of the largest; None if the largest is no norm to go by."""
    largest = max(norms.values())
    if not all(map(math.isfinite, norms.values())) or not _SMALLEST / _FLOOR <= largest <= _LARGEST:
        return None
    return {h: max(e, _FLOOR * largest) for h, e in norms.items()}


def _are_norms(norms: Mapping[Any, Any]) -> bool:
    return all(isinstance(e, float) and _SMALLEST <= e <= _LARGEST for e in norms.values())
