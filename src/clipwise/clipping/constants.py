"""The constants of each part: how far it is clipped, and how its parameters are scaled before that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clipwise.clipping.base import Bound, Clipper
from clipwise.clipping.statistics import LayerStatistics


class Constants:
    """The same in every step: nothing is counted, nothing is learned.

    Attributes:
        groups: the parameters of each part.
        norms: C_k, the most that a clipped vector may be in each part, after scaling.
        scales: m of each parameter by which its gradient is multiplied before the clip; 1 where none is given.
        bounds: what is released beside the gradient.
        lasts: for how many releases at least `learn` changes neither groups, norms nor scales.
        alone: whether a vector takes part in one part only, drawn at random; see privacy.Part.
        share: of all vectors, how many each part is expected to hold; what the divisor is multiplied by.
        frozen: entries that count 0 before the clip, by parameter: bool of its shape. None where none is given.
    """

    lasts: float = math.inf
    alone: bool = False
    share: float = 1.0

    def __init__(
        self,
        groups: dict[str, list[str]],
        norms: dict[str, float],
        scales: Mapping[str, float] | None = None,
    ) -> None:
        self.groups, self.norms, self.scales = groups, norms, dict(scales or {})
        self.bounds: tuple[Bound, ...] = ()
        self.frozen: dict[str, Tensor] = {}

    def bounds_with(self, factor: float) -> tuple[Bound, ...]:
        """All bounds of a step, where a unit moves part k by at most `factor` times C_k."""
        parts = (
            Bound(
                part,
                tuple(names),
                factor * self.norms[part],
                scales=tuple(self.scales.get(name, 1.0) for name in names) if self.scales else (),
                alone=self.alone,
            )
            for part, names in self.groups.items()
        )
        return (*parts, *self.bounds)

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        """Which of so many vectors take part in each part, if they do not take part in all: bool [vectors]."""
        return {}

    def counts(
        self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What the step releases beside the gradient, from each part's norms [B]."""
        return {}

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """Adapt to what was released: noised, over the divisor. Returns whether anything changed.

        `noise` is the standard deviation of the noise on each coordinate of the means; see `Clipper.noise`.
        """
        return False

    def settle(self) -> None:
        """Put frozen entries of the parameters back where they belong."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, in plain types. It is public."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go back to what a `state_dict` holds. Returns whether anything changed."""
        return False


class ClipperByConstants(Clipper):
    """A clipper whose bounds are its constants' norms times a factor, and change when those do.

    Args:
        constants: of the parts.
        factor: by how many times C_k a unit can move part k.
        vectors: how many clipped vectors a step is expected to have.
        statistics: of layers, which are released beside the gradient.
    """

    def __init__(
        self,
        constants: Constants,
        factor: float,
        vectors: float,
        statistics: LayerStatistics | None = None,
    ) -> None:
        self._constants, self._factor = constants, factor
        self._statistics = LayerStatistics() if statistics is None else statistics
        self.divisor = vectors * constants.share
        self.lasts, self.draws = constants.lasts, constants.alone
        self._restate()

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        return self._constants.frozen

    def settle(self) -> None:
        self._constants.settle()

    def learn(self, means: Mapping[str, Tensor]) -> bool:
        # A share below 1 is of parts that hold some of the vectors only; statistics are of all of them.
        self._statistics.learn(
            {b.name: means[b.name] * self._constants.share for b in self._statistics.bounds}
        )
        changed = self._constants.learn(means, self.noise)
        if changed:
            self._restate()
        return changed

    def clips(self) -> object:
        constants = self._constants
        groups = {part: tuple(names) for part, names in constants.groups.items()}
        return groups, dict(constants.norms), dict(constants.scales)

    def state_dict(self) -> dict[str, Any]:
        return self._constants.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        changed = self._constants.load_state_dict(state)
        if changed:
            self._restate()
        return changed

    def _restate(self) -> None:
        """Take over what follows from the constants."""
        self.bounds = (*self._constants.bounds_with(self._factor), *self._statistics.bounds)
