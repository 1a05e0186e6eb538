"""The constants of each part: how far it is clipped, and how its parameters are scaled before that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clipwise.clipping.strategy import Bound


class Constants:
    """The same in every step: nothing is counted, nothing is learned.

    Attributes:
        groups: the parameters of each part.
        norms: C_k, the most that a clipped vector may be in each part, after scaling.
        scales: m of each parameter by which its gradient is multiplied before the clip; 1 where none is given.
        bounds: what is released beside the gradient.
        adapts: whether `learn` may change groups, norms or scales.
        alone: whether a vector takes part in one part only, drawn at random; see privacy.Part.
        share: of all vectors, how many each part is expected to hold; what the divisor is multiplied by.
        frozen: entries that count 0 before the clip, by parameter: bool of its shape. None where none is given.
    """

    adapts: bool = False
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
