"""The thresholds C_k of strategies that clip vectors: how they are given, and how they change from step to step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping.base import Bound, Site, damaged
from clipwise.clipping.grouping import Groups, Policy, group_parameters, norms_of_parts
from clipwise.errors import ConfigurationError
from clipwise.privacy import Adjacency
from clipwise.validation.arguments import number, with_plain_numbers

# In float32 a smaller bound would round clipped gradients and noise to a grid, and a larger one to infinity.
_LEAST_NORM, _MOST_NORM = 1e-30, 1e30


class Constants:
    """The constants of each part: C_k, and how its parameters are scaled before the clip. Here they never change.

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


class ScaledConstants(Constants):
    """Other constants, whose norms are multiplied by a factor that changes."""

    def __init__(self, inner: Constants) -> None:
        super().__init__(inner.groups, inner.norms, inner.scales)
        self._inner, self.bounds = inner, inner.bounds
        self.alone, self.share = inner.alone, inner.share

    def factor(self, names: Sequence[str]) -> float:
        """By which the norm of a part of these parameters is multiplied."""
        raise NotImplementedError

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        return self._inner.chosen(secret, vectors)

    def counts(
        self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self._inner.counts(norms, muted_B, real_B)

    def _take_over(self) -> bool:
        self.groups, self.scales = self._inner.groups, dict(self._inner.scales)
        self.norms = {part: C * self.factor(self.groups[part]) for part, C in self._inner.norms.items()}
        return True


class NormRule(ABC):
    """A `max_norm` that changes while a model is trained."""

    @abstractmethod
    def constants(self, parts: Groups | Policy, site: Site) -> Constants:
        """For one model, or an error if the rule cannot serve it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The rule in plain types, for fingerprints and statements."""


MaxNorm = float | Mapping[str, float] | NormRule


def require_max_norm(max_norm: object) -> None:
    """Refuse a bound that is no positive number, nor one for each part."""
    norms: Iterable[Any] = max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]
    for norm in norms:
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if not (number and _LEAST_NORM <= norm <= _MOST_NORM):
            raise ConfigurationError(
                f"max_norm must be a positive, finite number (from {_LEAST_NORM:g} to {_MOST_NORM:g}), not {norm!r}."
            )


def constants_for(max_norm: MaxNorm, parts: Groups | Policy, site: Site) -> Constants:
    """The constants of each part of one model."""
    if isinstance(max_norm, NormRule):
        return max_norm.constants(parts, site)
    if isinstance(parts, Policy):
        if isinstance(max_norm, Mapping):
            raise _wrong_norm(parts)
        return parts.constants(max_norm, site)
    groups = group_parameters(parts, site.parameters)
    return Constants(groups, norms_of_parts(max_norm, list(groups)))


def _wrong_norm(policy: Policy) -> ConfigurationError:
    return ConfigurationError(
        f"max_norm must be a number with parts={type(policy).__name__}(...), which chooses the bounds."
    )


@dataclass(frozen=True)
class Quantile(NormRule):
    """A `max_norm` that moves until a share `target` of the examples is not clipped.

    After each step, with f the released fraction of examples whose gradient was within C (one whose norm is
    close to C counts in part),

        C <- C exp(-learning_rate (f - target)),   kept within [minimum, maximum].

    With several parts each has a count and a C_k of its own, and `initial`, `minimum` and `maximum` are
    totals: C_k begins at initial / sqrt(K), and so on.

    Args:
        target: the share of examples that should not be clipped, above 0 and below 1.
        initial: C in the first step.
        learning_rate: how fast log C moves.
        count_noise: the standard deviation of the noise on f; that on the count is s = count_noise L, with L
            the expected batch size. The counts' share comes out of the noise multiplier z of the step: the
            gradient gets the larger multiplier

                z' = (z^-2 - K (S / s)^2)^(-1/2),   S = 1/2 under zero-out, 1 under replace-one.

            A `count_noise` that leaves nothing for the gradient is refused.
        minimum, maximum: C never leaves these. Public, as all the others.

    Guarantee:
        What is released is sum_i (b_i - 1/2) + noise, b_i = clamp(3/2 - |g_i| / C, 0, 1): an example that is not
        there adds 0, one that is there moves it by at most 1/2, a replaced one by 1. It is divided by L and
        never by the realised batch size. A gradient that is not finite counts as clipped.
        b_i is a ramp from C/2 to 3C/2 and no jump at C: the last digits of a norm may depend on the size of the
        batch, and where many norms are alike, a jump would let one example move all of their b_i.
    """

    target: float = 0.5
    initial: float = 1.0
    learning_rate: float = 0.2
    count_noise: float = 0.05
    minimum: float = 1e-6
    maximum: float = 1e6

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for name, value in asdict(self).items():
            number(f"Quantile: {name}", value, above=0)
        if self.target >= 1:
            raise ConfigurationError(
                f"Quantile: target={self.target!r} must be below 1: it is the share of examples not clipped."
            )
        if self.minimum < _LEAST_NORM or self.maximum > _MOST_NORM:
            raise ConfigurationError(
                f"Quantile: minimum={self.minimum!r} and maximum={self.maximum!r} must lie between {_LEAST_NORM:g} and "
                f"{_MOST_NORM:g}, where sums and noise of float32 are safe."
            )
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                f"Quantile: initial={self.initial!r} must lie between minimum={self.minimum!r} and "
                f"maximum={self.maximum!r}: widen them, or begin within them."
            )

    def constants(self, parts: Groups | Policy, site: Site) -> Constants:
        if isinstance(parts, Policy):
            raise _wrong_norm(parts)
        return QuantileNorms(self, site, group_parameters(parts, site.parameters))

    def describe(self) -> dict[str, Any]:
        return {"rule": "quantile", **asdict(self)}


class QuantileNorms(Constants):
    """`Quantile` for the parts of one model: C_k of the moment."""

    lasts = 1

    def __init__(self, quantile: Quantile, site: Site, groups: dict[str, list[str]]) -> None:
        parts = list(groups)
        super().__init__(groups, norms_of_parts(quantile.initial, parts))
        self._quantile = quantile
        self._least = norms_of_parts(quantile.minimum, parts)
        self._most = norms_of_parts(quantile.maximum, parts)
        self._names = {part: f"count of {part}" for part in parts}
        for name in self._names.values():
            if name in site.parameters:
                raise ConfigurationError(
                    f"max_norm=Quantile(...) needs the name {name!r}: rename that parameter."
                )
        # b - 1/2 is -1/2 or 1/2: an example brings one of them, and a replaced one goes from one to the other.
        sensitivity = 1.0 if site.adjacency is Adjacency.REPLACE_ONE else 0.5
        self.bounds = tuple(
            Bound(name, (), sensitivity, quantile.count_noise) for name in self._names.values()
        )

    def counts(
        self, norms: Mapping[str, Tensor], muted_B: Tensor, real_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        """sum_i (b_i - 1/2) of each part over the examples that are real, in float64; 0 for an empty batch."""
        counted_B = torch.ones_like(muted_B) if real_B is None else real_B
        return {
            self._names[part]: (_within(norms[part], C, muted_B) - 0.5).mul(counted_B).sum().reshape(1)
            for part, C in self.norms.items()
        }

    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """C <- C exp(-learning_rate (f - target)); by logarithms, since exp may overflow before the limits."""
        rule = self._quantile
        for part, C in self.norms.items():
            fraction = float(means[self._names[part]]) + 0.5
            log_C = math.log(C) - rule.learning_rate * (fraction - rule.target)
            least, most = self._least[part], self._most[part]
            log_C = min(max(log_C, math.log(least)), math.log(most))
            self.norms[part] = min(max(math.exp(log_C), least), most)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"norms": dict(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        norms = state.get("norms")
        if not (
            isinstance(norms, dict)
            and norms.keys() == self.norms.keys()
            and all(isinstance(C, float) and self._least[k] <= C <= self._most[k] for k, C in norms.items())
        ):
            raise damaged("its norms are missing or out of range")
        self.norms.update(norms)
        return True


def _within(norm_B: Tensor, C: float, muted_B: Tensor) -> Tensor:
    """b_i: 1 for a norm up to C/2, 0 from 3C/2 on, and a straight line between the two."""
    return (1.5 - norm_B.to(torch.float64) / C).clamp(0, 1).masked_fill(muted_B, 0)
